# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 5: nothing is lost. Saved in mid-epoch, restarted, resumed.

Each node has its own folder. The interrupted run and the run that continues it share nothing but these.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import pytest
import torch
from accelerate.utils import set_seed
from exactness import LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, full
from torch import nn
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.accelerator import run_checkpoints
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


SAMPLES, TOTAL = 50, 8


@dataclass(frozen=True)
class Run:
    """One launch: the plan, and where it starts and stops (optimizer steps over all epochs)."""

    strategy: str
    sizes: tuple
    nodes: tuple[int, ...]
    folders: tuple[str, ...]
    stop: int
    save_at: int | None = None
    resume: bool = False
    dropout: bool = False
    shuffle: bool = True
    own_accumulation: int = 1
    num_workers: int = 0
    model: str = "vit"
    communication: dict = field(default_factory=dict)  # keywords of the plan

    @property
    def world_size(self) -> int:
        return len(self.sizes)


def train(run: Run) -> tuple[dict, list[float], dict]:
    """Parameters, the losses of this rank since it started, and the optimizer's moments, as far as it has them."""
    case = CASES[run.model]
    set_seed(7)
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes(run.sizes, strategy=run.strategy, **run.communication),
        lsdp_plugin=LSDPPlugin(loss_weighting=case.weighting),
        gradient_accumulation_steps=run.own_accumulation,
    )
    folder = run.folders[accelerator.topology.node]
    model = case.model().double()
    if run.dropout:
        model = _with_dropout(model)
    optimizer = make_optimizer(model, LEARNING_RATE, WEIGHT_DECAY)
    ranks = accelerator.num_processes  # accelerate steps a scheduler once a rank
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + 0.1 * count / ranks))
    loader = DataLoader(
        case.dataset(SAMPLES, torch.float64),
        batch_size=4,
        shuffle=run.shuffle,
        collate_fn=collate,
        num_workers=run.num_workers,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if run.resume:
        accelerator.load_state(f"{folder}/ckpt")
    model.train()
    losses, batches = [], None
    while accelerator.completed_steps < run.stop:
        batches = accelerator.skip_first_batches(loader) if run.resume and batches is None else loader
        for batch in batches:
            with accelerator.accumulate(model):
                loss = case.loss(model, batch)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if accelerator.completed_steps == run.save_at:
                    accelerator.save_state(f"{folder}/ckpt")
                if accelerator.completed_steps >= run.stop:
                    break
    moments = {
        f"{name}.{key}": full(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    return {name: full(parameter) for name, parameter in model.named_parameters()}, losses, moments


def _with_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.2
    return model


def identical(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def folders(tmp_path, nodes: tuple[int, ...]) -> tuple[str, ...]:
    made = [tmp_path / f"node{index}" for index in range(len(nodes))]
    for folder in made:
        folder.mkdir()
    return tuple(map(str, made))


INT8 = {"communication_dtype": "int8"}
POWERSGD = {"communication_dtype": "powersgd", "powersgd_rank": 2, "powersgd_warmup_steps": 2}
COLLECTIVES = {"intra_node": "collectives"}
#: Placements of the small ViT's units.
MIXED = {
    "placement": ModelPlacement(
        {
            "": UnitPlacement(UnitStore.WORLD),
            "vit.embeddings": UnitPlacement(UnitStore.REPLICATE),
            "vit.layers.0": UnitPlacement(UnitStore.WORLD_TO_NODE, checkpoint=True),
            "vit.layers.1": UnitPlacement(UnitStore.WORLD, slices=3),
        }
    )
}
OTHERWISE_MIXED = {
    "placement": ModelPlacement(
        {"vit.embeddings": UnitPlacement(UnitStore.WORLD_KEPT), "vit.layers.0": UnitPlacement(UnitStore.REPLICATE)}
    )
}
SAME_PLAN = [
    ("ddp", (5, 3), (1, 1), {"dropout": True}),
    ("lsdp", (5, 3), (1, 1), {"dropout": True, "communication": COLLECTIVES}),
    ("lsdp", (5, 3), (2,), {"dropout": True, "own_accumulation": 2}),
    ("fsdp", (5, 3), (1, 1), {"model": "gpt2"}),
    ("zero2", ((2, 2), (2, 2)), (2,), {"num_workers": 2}),
    ("lsdp", (3, 1, 2, 2), (2, 2), {"dropout": True, "model": "gpt2"}),
    ("ddp", (3, 1, 2, 2), (1, 1, 1, 1), {"dropout": True}),
    ("group_sharding", (3, 1, 2, 2), (2, 2), {"communication": COLLECTIVES}),
    ("lsdp", (5, 3), (1, 1), {"communication": INT8}),
    ("ddp", (5, 3), (1, 1), {"communication": POWERSGD, "own_accumulation": 2}),
    ("lsdp", (3, 1, 2, 2), (2, 2), {"communication": POWERSGD}),
    ("ddp", (3, 1, 2, 2), (2, 2), {"communication": INT8}),
    ("ddp", (3, 1, 2), (1, 2), {"communication": POWERSGD | COLLECTIVES}),
    ("osdp", (3, 1, 2, 2), (2, 2), {"dropout": True, "communication": MIXED}),
]


#: In the first epoch (7 global batches), and in the second.
SAVES = [3, 9]
#: Every case in the slow tests; in the others each mechanism and each format once, in the first epoch.
DEFAULT_CASES = (0, 1, 3, 5, 8, 9, 12, 13)


@pytest.mark.parametrize(
    ("strategy", "sizes", "nodes", "options", "save_at"),
    [
        pytest.param(
            *case, save_at, marks=[] if (save_at, number) in {(3, n) for n in DEFAULT_CASES} else pytest.mark.slow
        )
        for number, case in enumerate(SAME_PLAN)
        for save_at in SAVES
    ],
)
def test_resumed_run_is_bit_identical(workers, tmp_path, strategy, sizes, nodes, options, save_at):
    save_at = save_at // options.get("own_accumulation", 1)
    run = Run(strategy, sizes, nodes, folders(tmp_path, nodes), stop=save_at + 4, save_at=save_at, **options)
    pool = workers(run.world_size)
    uninterrupted = pool.run(train, run, nodes=nodes)
    resumed = pool.run(train, replace(run, save_at=None, resume=True), nodes=nodes)
    for (parameters, losses, moments), (parameters_, losses_, moments_) in zip(uninterrupted, resumed, strict=True):
        assert losses_ == losses[-len(losses_) :] and losses_
        assert identical(parameters_, parameters)
        assert identical(moments_, moments)


def all_moments(ranks: list[tuple]) -> dict:
    """Those of all ranks: where the ranks of a node share parameters, each has the moments of its own ones."""
    return {name: moment for *_, moments in ranks for name, moment in moments.items()}


def placing(strategy: str, nodes: tuple[int, ...]) -> dict:
    """On CPUs too, group_sharding stands for FSDP2 here, and lsdp for what CPUs do without it."""
    if strategy == "osdp":
        return MIXED if nodes == (2, 2) else OTHERWISE_MIXED
    return COLLECTIVES if strategy == "group_sharding" else {}


OTHER_PLANS = [
    (("ddp", (5, 3), (1, 1)), ("lsdp", (2, 6), (2,))),
    (("lsdp", (5, 3), (1, 1)), ("fsdp", (2, 3, 2, 1), (2, 2))),
    (("fsdp", (2, 3, 2, 1), (2, 2)), ("group_sharding", ((3, 2), (1, 2)), (1, 1))),
    (("lsdp", (2, 3, 2, 1), (2, 2)), ("lsdp", (4, 3, 1), (1, 2))),
    (("lsdp", (4, 3, 1), (1, 2)), ("ddp", (8,), (1,))),
    (("ddp", (8,), (1,)), ("zero2", (4, 3, 1), (1, 2))),
    (("osdp", (2, 3, 2, 1), (2, 2)), ("osdp", (4, 3, 1), (1, 2))),
    (("osdp", (4, 3, 1), (1, 2)), ("lsdp", (2, 3, 2, 1), (2, 2))),
    (("fsdp", (5, 3), (1, 1)), ("osdp", (2, 3, 2, 1), (2, 2))),
]


@pytest.mark.parametrize(
    ("first", "second"),
    # By default those that leave and reach whole, node-shared, world-sharded and mixed models.
    [
        pytest.param(*pair, marks=pytest.mark.slow if place in (0, 3, 4, 6, 7) else [])
        for place, pair in enumerate(OTHER_PLANS)
    ],
)
def test_resuming_under_another_plan_equals_one_run(workers, tmp_path, first, second):
    (strategy, sizes, nodes), (strategy_, sizes_, nodes_) = first, second
    places = folders(tmp_path, max(nodes, nodes_, key=len))
    run = Run(strategy, sizes, nodes, places, stop=9, save_at=4, communication=placing(strategy, nodes))
    whole = workers(run.world_size).run(train, run, nodes=nodes)
    other = Run(strategy_, sizes_, nodes_, places, stop=9, resume=True, communication=placing(strategy_, nodes_))
    resumed = workers(other.world_size).run(train, other, nodes=nodes_)
    for parameters, *_ in resumed:
        assert relative_error(parameters, whole[0][0]) <= 1e-12
    assert relative_error(all_moments(resumed), all_moments(whole)) <= 1e-12


def test_a_node_without_the_checkpoint_gets_it(workers, tmp_path):
    first = Run("lsdp", (5, 3), (1, 1), folders(tmp_path, (1, 1)), stop=7, save_at=4)
    whole = workers(2).run(train, first, nodes=(1, 1))
    empty = tmp_path / "new"
    empty.mkdir()
    moved = replace(first, save_at=None, resume=True, folders=(str(empty), first.folders[1]))
    for (parameters, *_), (expected, *_) in zip(workers(2).run(train, moved, nodes=(1, 1)), whole, strict=True):
        assert identical(parameters, expected)
    assert (empty / "ckpt").is_dir()


def resume_in_another_order(strategy: str, root: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """An optimizer has the parameters in another order on each rank, and after a restart, as of a set."""

    def start(order: int) -> tuple[LSHDPAccelerator, torch.optim.Optimizer, list[torch.Tensor]]:
        accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes((1, 1), strategy=strategy))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(size, size + 1) for size in (3, 4, 5))).double()
        by_name = list(model.parameters())
        optimizer = torch.optim.AdamW(by_name[order:] + by_name[:order], lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        return accelerator, model, optimizer

    def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        states = optimizer.optimizer.state
        return [full(states[p]["exp_avg"]) for p in model.parameters() if p in states]

    rank = torch.distributed.get_rank()
    accelerator, model, optimizer = start(2 * rank)
    accelerator.backward(model(torch.ones(1, 3, dtype=torch.float64)).square().mean())
    optimizer.step()
    accelerator.save_state(root)
    saved = moments(model, optimizer)
    accelerator.free_memory()
    accelerator, model, optimizer = start(1 + 3 * rank)
    accelerator.load_state(root)
    return saved, moments(model, optimizer)


@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp"])
def test_an_optimizer_may_have_its_parameters_in_any_order(workers, tmp_path, strategy):
    ranks = workers(2).run(resume_in_another_order, strategy, str(tmp_path / "state"), nodes=(2,))
    assert any(saved for saved, _ in ranks)  # under lsdp a rank has the moments of its own buckets
    for saved, loaded in ranks:
        assert all(torch.equal(one, other) for one, other in zip(saved, loaded, strict=True))


def resume_from_before_sums_of_nodes(run: Run) -> tuple[list[str], bool]:
    """Saves as a release did that compressed each rank's gradients, and goes on; returns warnings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_checkpoints, "_SUMS_INSIDE_NODES", "not there")
        train(run)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger(run_checkpoints.__name__)
    logger.addHandler(handler)
    _, losses, _ = train(replace(run, save_at=None, resume=True))
    logger.removeHandler(handler)
    return told, bool(losses)


def test_rounding_errors_of_ranks_are_not_taken_for_those_of_nodes(workers, tmp_path):
    communication = {"communication": POWERSGD}
    run = Run("ddp", (3, 1, 2, 2), (2, 2), folders(tmp_path, (2, 2)), stop=7, save_at=4, **communication)
    ranks = workers(4).run(resume_from_before_sums_of_nodes, run, nodes=(2, 2))
    assert all(went_on for _, went_on in ranks)
    told, _ = ranks[0]
    assert any("saved by a release under which each rank sent powersgd" in line for line in told)
