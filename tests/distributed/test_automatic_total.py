# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Automatic batch sizes without a total: global batches are those of the script, and the run divides them.

As in `test_automatic`, the ranks are equally fast, and what they measure is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from test_script_totals import every_accelerator_is_ours
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.runtime.step_exchange import RankReport


TIMEOUT_SECONDS = 60
BATCH_SIZE, TOTAL, SAMPLES = 8, 16, 160
OPEN = {"ACCELERATE_LSHDP_PLAN": '{"version": 1, "strategy": "lsdp", "automatic": {"rebalance_every": 5}}'}


@dataclass
class Outcome:
    parameters: list[torch.Tensor]
    sizes: list[tuple[int, ...]]
    """Of all ranks, in each step."""
    decisions: list[dict[str, Any]]
    plan: dict[str, Any]


class Unsized(BatchSampler):
    """A batch sampler of the script's own that does not say how large its batches are."""

    def __init__(self, samples: int) -> None:
        super().__init__(SequentialSampler(range(samples)), BATCH_SIZE, drop_last=False)

    def __getattribute__(self, name: str) -> Any:
        if name in ("batch_size", "drop_last"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __iter__(self):
        return iter(
            [list(range(i, min(i + BATCH_SIZE, len(self.sampler)))) for i in range(0, len(self.sampler), BATCH_SIZE)]
        )

    def __len__(self) -> int:
        return -(-len(self.sampler) // BATCH_SIZE)


def data(samples: int = SAMPLES, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(samples)
    dataset = TensorDataset(torch.randn(samples, 4, generator=generator, dtype=torch.float64))
    return DataLoader(dataset, **(options or {"batch_size": BATCH_SIZE}))


def make_model() -> nn.Module:
    set_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[0].sum(dim=1, keepdim=True)).square().mean()


def of_unequal_speed(accelerator: LSHDPAccelerator) -> LSHDPAccelerator:
    """Rank 0 says that it is three times as fast as rank 1."""
    timer = accelerator.session.timer

    def backward_ends() -> RankReport:
        place, rank = accelerator.batch_place, accelerator.process_index
        timer._compute += 0.01 + place.cut.sizes[rank] / (30.0, 10.0)[rank]
        return RankReport(timer._compute, wait_seconds=0.0, optimizer_seconds=0.001, data_seconds=0.0)

    timer.backward_ends = backward_ends
    return accelerator


def loop(
    steps: int,
    named: bool = False,
    own: dict[str, Any] | None = None,
    save_at: int | None = None,
    folder: str = "",
    resume: bool = False,
    second: int | None = None,
) -> Outcome:
    """An ordinary loop; with a second loader of that batch size, it trains on both in turns."""
    with every_accelerator_is_ours():
        accelerator = of_unequal_speed(LSHDPAccelerator() if named else Accelerator())
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaders = [data(**(own or {}))] + ([data(96, batch_size=second)] if second else [])
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    assert accelerator.plan.total_batch_size is None
    if resume:
        accelerator.load_state(f"{folder}/{accelerator.process_index}")
    sizes: list[tuple[int, ...]] = []
    first = resume
    while len(sizes) < steps:
        for loader in loaders:
            for batch in accelerator.skip_first_batches(loader) if first else loader:
                first = False
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                sizes.append(accelerator.batch_place.cut.sizes)
                if len(sizes) == save_at:
                    accelerator.save_state(f"{folder}/{accelerator.process_index}")
                if len(sizes) == steps:
                    break
            if len(sizes) == steps:
                break
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    decisions = [decision.to_dict() for decision in accelerator.batch_size_decisions]
    return Outcome([p.detach().clone() for p in parameters], sizes, decisions, accelerator.plan.to_dict())


def alone(steps: int, second: int | None = None) -> list[torch.Tensor]:
    """One process that never heard of ranks, on the same global batches."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaders = [data(batch_size=TOTAL)] + ([data(96, batch_size=2 * second)] if second else [])
    batches = (batch for _ in range(steps) for loader in loaders for batch in loader)
    for batch in islice(batches, steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    difference = sum((a - b).square().sum().item() for a, b in zip(found, expected, strict=True))
    return (difference / sum(b.square().sum().item() for b in expected)) ** 0.5


def same_everywhere(outcomes: list[Outcome]) -> Outcome:
    first, *others = outcomes
    for other in others:
        assert (other.sizes, other.decisions, other.plan) == (first.sizes, first.decisions, first.plan)
    return first


LOOPS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "unmodified loop": ({}, (1, 1)),
    "unmodified loop on one node": ({}, (2,)),
    "LSHDPAccelerator": ({"named": True}, (1, 1)),
    "batch sampler without a batch size": ({"own": {"batch_sampler": Unsized(SAMPLES)}}, (1, 1)),
}


def run_loop(options: dict[str, Any]) -> Outcome:
    return loop(**options)


@pytest.mark.parametrize("name", LOOPS)
def test_global_batches_are_those_of_the_script(workers, name):
    options, nodes = LOOPS[name]
    outcomes = workers(2).run(run_loop, {"steps": 24, **options}, nodes=nodes, env=OPEN, timeout=TIMEOUT_SECONDS)
    outcome = same_everywhere(outcomes)
    assert outcome.sizes[0] == (BATCH_SIZE, BATCH_SIZE)
    assert {sum(sizes) for sizes in outcome.sizes} == {TOTAL}
    assert abs(outcome.sizes[-1][0] - 12) <= 1, outcome.decisions
    assert outcome.plan["automatic"]["total"] == outcome.plan["batch"]["total"] == TOTAL
    assert max(error(o.parameters, alone(24)) for o in outcomes) <= 1e-12


def test_a_second_loader_is_divided_in_the_same_proportions(workers):
    outcome = same_everywhere(
        workers(2).run(run_loop, {"steps": 36, "second": 3}, nodes=(1, 1), env=OPEN, timeout=TIMEOUT_SECONDS)
    )
    assert [sum(sizes) for sizes in outcome.sizes] == [TOTAL] * 10 + [6] * 16 + [TOTAL] * 10
    assert outcome.sizes[9] != (8, 8) and outcome.sizes[10] in {(4, 2), (5, 1)}
    assert error(outcome.parameters, alone(36, second=3)) <= 1e-12


def test_a_resumed_run_goes_on_bit_for_bit(workers, tmp_path):
    for step in (7, 18):  # before and after the first decision
        folder = {"folder": str(tmp_path / str(step))}
        whole, _, rest = (
            same_everywhere(workers(2).run(run_loop, options, nodes=(1, 1), env=OPEN, timeout=TIMEOUT_SECONDS))
            for options in (
                {"steps": 26},
                {"steps": step, "save_at": step, **folder},
                {"steps": 26 - step, "resume": True, **folder},
            )
        )
        assert rest.sizes == whole.sizes[step:] and rest.decisions == whole.decisions and whole.decisions
        assert all(torch.equal(a, b) for a, b in zip(rest.parameters, whole.parameters, strict=True))


def resume_with_another_batch_size(folder: str) -> list[tuple[int, ...]]:
    loop(steps=12, save_at=12, folder=folder)
    return loop(steps=3, resume=True, folder=folder, own={"batch_size": 4}).sizes


def test_a_checkpoint_of_another_total_does_not_decide_the_total(workers, tmp_path):
    sizes = workers(2).run(
        resume_with_another_batch_size, str(tmp_path), nodes=(1, 1), env=OPEN, timeout=TIMEOUT_SECONDS
    )
    assert sizes == [[(4, 4)] * 3] * 2


def begin_with_another_batch() -> None:
    accelerator = LSHDPAccelerator()
    place = SimpleNamespace(cut=GlobalBatchCut.equal(4 + accelerator.process_index, 2))
    accelerator.session.total.before_backward(
        place, accelerator.plan, accelerator.num_processes, accelerator.session.engine.collective_begins
    )


def test_ranks_that_begin_with_different_batches_stop_together(workers):
    errors = workers(2).run(
        begin_with_another_batch, nodes=(1, 1), env=OPEN, timeout=TIMEOUT_SECONDS, expect_failure=True
    )
    assert len({e.message for e in errors}) == 1 and "global batches of [8, 10] samples" in errors[0].message, errors


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"dispatch_batches": True}, "dispatch_batches=True"),
        ({"batch_sampler": "unsized"}, "without an integer batch_size"),
    ],
)
def test_what_says_no_total_is_refused_on_all_ranks(workers, own, message):
    errors = workers(2).run(start_with, own, nodes=(1, 1), env=OPEN, timeout=TIMEOUT_SECONDS, expect_failure=True)
    assert len({e.message for e in errors}) == 1 and message in errors[0].message, errors


def start_with(own: dict[str, Any]) -> None:
    with every_accelerator_is_ours():
        accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(dispatch_batches=own.get("dispatch_batches"))
        )
    loader = data(10, batch_sampler=[[i] for i in range(10)] + [[]] * 2) if "batch_sampler" in own else data()
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    next(iter(loader))
