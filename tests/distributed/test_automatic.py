# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Automatic batch sizes in training: all ranks switch together, and nothing but the speed changes.

The ranks of these tests are equally fast; what they measure is replaced by the times of ranks that are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from exactness import LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, full
from torch.utils.data import DataLoader, IterableDataset
from training_cases import CASES, collate, make_optimizer, reference_run, relative_error
from workers import WorkerError

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.runtime.step_exchange import RankReport


TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Run:
    """One launch of `train`.

    `speeds` are samples a second of each rank; from `slower_from` on, rank `slower` has half of its speed.
    """

    speeds: tuple[float, ...]
    total: int = 16
    steps: int = 24
    strategy: str = "lsdp"
    model: str = "vit"
    start: tuple | None = None
    own_accumulation: int = 1
    num_workers: int = 0
    prefetch_factor: int | None = None
    streamed: bool = False
    samples: int = 117
    slower: int | None = None
    slower_from: int = 10**9
    rebalance_every: int = 5
    save_at: int | None = None
    folders: tuple[str, ...] = ()
    resume: bool = False


@dataclass
class Outcome:
    parameters: dict[str, torch.Tensor]
    decisions: list[dict[str, Any]]
    sizes: list[tuple[int, ...]]
    """Of all ranks, in each optimizer step."""
    plan: dict[str, Any]
    samples_seen: int


class PretendedSpeed:
    """Stands for the accelerator's clock: says how long a rank of a given speed would have computed."""

    def __init__(self, accelerator: LSHDPAccelerator, seconds: Callable[[int, int], float]) -> None:
        self.accelerator = accelerator
        self.seconds = seconds
        self.step = -1
        self.compute = 0.0

    def __call__(self) -> RankReport:
        accelerator = self.accelerator
        if accelerator.completed_steps != self.step:
            self.step, self.compute = accelerator.completed_steps, 0.0
        place = accelerator.batch_place
        size = place.cut.sizes[accelerator.process_index] // place.micro_batches
        self.compute += self.seconds(self.step, size)
        return RankReport(self.compute, wait_seconds=0.0, optimizer_seconds=0.001, data_seconds=0.0)


class Stream(IterableDataset):
    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


def train(run: Run) -> Outcome:
    case = CASES[run.model]
    set_seed(3)
    plan = Plan.auto(run.total, strategy=run.strategy, rebalance_every=run.rebalance_every)
    if run.start is not None:
        plan = plan.with_batch(Plan.from_batch_sizes(run.start).batch)
    accelerator = LSHDPAccelerator(
        plan=plan,
        lsdp_plugin=LSDPPlugin(loss_weighting=case.weighting),
        gradient_accumulation_steps=run.own_accumulation,
    )
    rank = accelerator.process_index

    def seconds(step: int, samples: int) -> float:
        slowed = rank == run.slower and step >= run.slower_from
        return 0.01 + samples / run.speeds[rank] * (2 if slowed else 1)

    accelerator.session.timer.backward_ends = PretendedSpeed(accelerator, seconds)
    model = case.model().double()
    optimizer = make_optimizer(model, LEARNING_RATE, WEIGHT_DECAY)
    dataset = case.dataset(run.samples, torch.float64)
    loader = DataLoader(
        Stream(dataset) if run.streamed else dataset,
        batch_size=4,
        collate_fn=collate,
        num_workers=run.num_workers,
        prefetch_factor=run.prefetch_factor,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if run.resume:
        accelerator.load_state(f"{run.folders[rank]}/ckpt")
    model.train()
    sizes, batches = [], None
    while accelerator.completed_steps < run.steps:
        batches = accelerator.skip_first_batches(loader) if run.resume and batches is None else loader
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                sizes.append(accelerator.batch_place.cut.sizes)
                if accelerator.completed_steps == run.save_at:
                    accelerator.save_state(f"{run.folders[rank]}/ckpt")
                if accelerator.completed_steps >= run.steps:
                    break
    parameters = {name: full(parameter) for name, parameter in model.named_parameters()}
    decisions = [decision.to_dict() for decision in accelerator.batch_size_decisions]
    return Outcome(parameters, decisions, sizes, accelerator.plan.to_dict(), accelerator.samples_seen)


def same_everywhere(outcomes: list[Outcome]) -> Outcome:
    """Every rank did the same at the same steps."""
    first, *others = outcomes
    for other in others:
        assert other.sizes == first.sizes and other.decisions == first.decisions and other.plan == first.plan
    return first


def oracle(run: Run) -> dict[str, torch.Tensor]:
    """One process that never heard of sizes, on the same global batches."""
    epoch = [list(range(i, min(i + run.total, run.samples))) for i in range(0, run.samples, run.total)]
    steps_an_epoch = -(-len(epoch) // run.own_accumulation)
    assert len(epoch) % run.own_accumulation == 0, "the oracle has no short windows"
    reference = reference_run(
        run.model,
        torch.float64,
        epoch * (-(-run.steps // steps_an_epoch)),
        weighting=CASES[run.model].weighting,
        steps=run.steps,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        gradient_accumulation_steps=run.own_accumulation,
        dataset=CASES[run.model].dataset(run.samples, torch.float64),
    )
    return reference.parameters


EXACT = {
    "lsdp": (Run((30.0, 10.0)), (1, 1), (12, 4)),
    "one node": (Run((30.0, 10.0)), (2,), (12, 4)),
    "ddp": (Run((10.0, 30.0), strategy="ddp"), (1, 1), (4, 12)),
    "fsdp": (Run((10.0, 30.0), strategy="fsdp"), (1, 1), (4, 12)),
    "tokens": (Run((30.0, 10.0), model="gpt2"), (1, 1), (12, 4)),
    "workers": (Run((30.0, 10.0), num_workers=1, prefetch_factor=3), (1, 1), (12, 4)),
    "stream": (Run((30.0, 10.0), streamed=True), (1, 1), (12, 4)),
    "accumulation in the plan": (Run((30.0, 10.0), start=((4, 2), (4, 2))), (1, 1), (12, 4)),
    "own accumulation": (Run((30.0, 10.0), own_accumulation=2, samples=128, steps=20), (1, 1), (12, 4)),
    "four ranks": (Run((40.0, 30.0, 20.0, 10.0), total=20, samples=137), (2, 2), (8, 6, 4, 2)),
}


#: Of what the others of these cases train with, too.
ALSO_ELSEWHERE = ("one node", "stream", "accumulation in the plan")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALSO_ELSEWHERE else []) for name in EXACT]
)
def test_sizes_follow_speed_and_parameters_do_not(workers, name):
    run, nodes, best = EXACT[name]
    outcomes = workers(len(run.speeds)).run(train, run, nodes=nodes, timeout=TIMEOUT_SECONDS)
    outcome = same_everywhere(outcomes)
    assert outcome.sizes[0] == tuple([run.total // len(run.speeds)] * len(run.speeds))
    assert all(abs(size - goal) <= 1 for size, goal in zip(outcome.sizes[-1], best, strict=True)), outcome.decisions
    assert {sum(sizes) for sizes in outcome.sizes} == {run.total}
    expected = oracle(run)
    assert max(relative_error(o.parameters, expected) for o in outcomes) <= 1e-12


def test_a_rank_that_becomes_slower_gets_less(workers):
    run = Run((20.0, 20.0), slower=1, slower_from=15, steps=40, samples=10_000)
    outcome = same_everywhere(workers(2).run(train, run, nodes=(1, 1), timeout=TIMEOUT_SECONDS))
    assert outcome.sizes[14] == (8, 8)
    assert outcome.sizes[-1] in {(10, 6), (11, 5)}
    assert all(decision["step"] >= 15 for decision in outcome.decisions)


def test_a_stream_with_workers_switches_between_epochs(workers):
    run = Run((30.0, 10.0), streamed=True, num_workers=1, samples=160, steps=30)
    outcome = same_everywhere(workers(2).run(train, run, nodes=(1, 1), timeout=TIMEOUT_SECONDS))
    assert outcome.sizes[:10] == [(8, 8)] * 10
    assert outcome.sizes[10] != (8, 8)
    assert relative_error(outcome.parameters, oracle(run)) <= 1e-12


def test_a_checkpoint_holds_what_was_learned(workers, tmp_path):
    folders = (str(tmp_path / "node0"), str(tmp_path / "node1"))
    whole = Run((30.0, 10.0), steps=30)
    first = Run((30.0, 10.0), steps=18, save_at=18, folders=folders)
    second = Run((30.0, 10.0), steps=30, folders=folders, resume=True)
    uninterrupted = same_everywhere(workers(2).run(train, whole, nodes=(1, 1), timeout=TIMEOUT_SECONDS))
    stopped = same_everywhere(workers(2).run(train, first, nodes=(1, 1), timeout=TIMEOUT_SECONDS))
    resumed = same_everywhere(workers(2).run(train, second, nodes=(1, 1), timeout=TIMEOUT_SECONDS))
    assert stopped.decisions and resumed.decisions == uninterrupted.decisions
    assert resumed.sizes == uninterrupted.sizes[18:]
    assert resumed.samples_seen == uninterrupted.samples_seen
    assert relative_error(resumed.parameters, uninterrupted.parameters) == 0


def start(options: dict[str, Any]) -> None:
    LSHDPAccelerator(**options)


FIXED = Plan.from_batch_sizes([3, 1])
REFUSED = {
    "no total": ({"batch_sizes": "auto"}, "total_batch_size"),
    "unknown word": ({"batch_sizes": "automatic"}, "'auto'"),
    "fewer samples than ranks": ({"batch_sizes": "auto", "total_batch_size": 1}, "at least one sample a rank"),
    "another total": ({"plan": FIXED, "total_batch_size": 5}, "the plan says 4"),
    "total alone": ({"total_batch_size": 4}, "batch_sizes='auto'"),
    "pace of fixed sizes": ({"plan": FIXED, "rebalance_every": 3}, "batch_sizes='auto'"),
    "sizes beside auto": ({"plan": Plan.auto(4), "batch_sizes": [3, 1]}, "automatic"),
    "another pace": ({"plan": Plan.auto(4), "rebalance_every": 3}, "rebalance_every=3"),
    "impossible pace": ({"batch_sizes": "auto", "total_batch_size": 4, "rebalance_every": 0}, "rebalance_every"),
    "foreign curves": (
        {
            "plan": Plan.from_dict(
                {
                    **Plan.auto(4).to_dict(),
                    "profile": {
                        "ranks": [{"rank": 0, "batch_sizes": [1], "seconds": [1.0], "max_micro_batch_size": 1}]
                    },
                }
            )
        },
        "curves of 1 ranks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_on_all_ranks(workers, name):
    options, message = REFUSED[name]
    errors: list[WorkerError | None] = workers(2).run(
        start, options, nodes=(1, 1), timeout=TIMEOUT_SECONDS, expect_failure=True
    )
    assert len({error.message for error in errors}) == 1 and message in errors[0].message, errors[0].message


def last_known(options: dict[str, Any]) -> tuple[list[int], int, int]:
    accelerator = LSHDPAccelerator(**options)
    plan = accelerator.plan
    return plan.batch_sizes, plan.automatic.total, plan.automatic.rebalance_every


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_sizes": "auto", "total_batch_size": 5, "rebalance_every": 7}, ([3, 2], 5, 7)),
        ({"batch_sizes": "auto", "plan": FIXED}, ([3, 1], 4, 10)),
        ({"batch_sizes": "auto", "plan": FIXED, "total_batch_size": 4}, ([3, 1], 4, 10)),
        ({"plan": Plan.auto(6)}, ([3, 3], 6, 10)),
    ],
)
def test_where_a_run_starts(workers, options, expected):
    assert workers(2).run(last_known, options, nodes=(1, 1), timeout=TIMEOUT_SECONDS) == [expected] * 2
