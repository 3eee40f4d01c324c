# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Loops that compute their steps and schedules from their own batch size train what they said, under the shim.

The loops have the shapes that accelerate's examples and transformers' `*_no_trainer.py` have. Each runs twice on as
many ranks: under plain accelerate, and with the shim and unequal sizes; steps and learning rates must be the same. A
plan of another global batch is refused on all ranks, at the first backward.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from strategy_cells import cells
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import get_scheduler
from workers import WorkerError

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.accelerator.replacement import replace_accelerator


TIMEOUT_SECONDS = 60
WIDTH, SAMPLES, BATCH_SIZE = 3, 45, 4
#: Of a global batch of BATCH_SIZE on each of so many ranks.
SIZES = {2: [5, 3], 3: [6, 4, 2], 4: [5, 5, 4, 2]}
Trace = tuple[int, list[float]]


class Rows(Dataset):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=generator, dtype=torch.float64)}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = Rows()
        return (rows[index] for index in range(SAMPLES))


class InBudget(Sampler):
    """A batch sampler of batches of different size, as one that keeps to a number of tokens."""

    def __init__(self, batches: int, drop_last: bool = False) -> None:
        self.batches = batches
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return ([i for i in range(SAMPLES) if i % self.batches == batch] for batch in range(self.batches))

    def __len__(self) -> int:
        return self.batches


def make_model() -> torch.nn.Module:
    set_seed(3)
    return torch.nn.Linear(WIDTH, 1).double()


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def make_loader(**options: Any) -> DataLoader:
    return DataLoader(Rows(), **{"batch_size": BATCH_SIZE, "shuffle": True, **options})


@contextmanager
def every_accelerator_is_ours() -> Iterator[None]:
    """What the shim does, in a process that goes on without it."""
    replace_accelerator()
    try:
        yield
    finally:
        # Where `__new__` has once been set, Python does not let a class be as it was without it.
        Accelerator.__new__ = staticmethod(lambda cls, *args, **kwargs: object.__new__(cls))


# Loops


def no_trainer(accumulation: int, drop_last: bool = False) -> Trace:
    """As a script for text classification without the Trainer: the model is in eval mode until the loop begins."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, loader = make_model().eval(), make_loader(drop_last=drop_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    epochs = 3
    updates_per_epoch = math.ceil(len(loader) / accumulation)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=epochs * updates_per_epoch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    updates_per_epoch = math.ceil(len(loader) / accumulation)
    most = epochs * updates_per_epoch
    completed, rates = 0, []
    for _ in range(math.ceil(most / updates_per_epoch)):
        model.train()
        for step, batch in enumerate(loader):
            accelerator.backward(loss_of(model, batch) / accumulation)
            if step % accumulation == 0 or step == len(loader) - 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                completed += 1
                rates.append(scheduler.get_last_lr()[0])
            if completed >= most:
                break
        model.eval()
    return completed, rates


def language_model_without_trainer(accumulation: int) -> Trace:
    """As a script for language models without the Trainer: the schedule is one of steps x processes."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, loader, evaluated = make_model().eval(), make_loader(), make_loader(shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    most = 2 * math.ceil(len(loader) / accumulation)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=accelerator.num_processes, num_training_steps=most)
    model, optimizer, loader, evaluated, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluated, scheduler
    )
    updates_per_epoch = math.ceil(len(loader) / accumulation)
    most = 2 * updates_per_epoch
    completed, rates = 0, []
    for _ in range(math.ceil(most / updates_per_epoch)):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
                rates.append(scheduler.get_last_lr()[0])
            if completed >= most:
                break
        model.eval()
        for batch in evaluated:
            accelerator.gather_for_metrics(model(batch["x"]))
    return completed, rates


def example(accumulation: int) -> Trace:
    """As accelerate's first example: the schedule is made from the length before `prepare`."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, loader, evaluated = make_model().eval(), make_loader(), make_loader(shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    length = (len(loader) * 2) // accumulation
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=length)
    model, optimizer, loader, evaluated, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluated, scheduler
    )
    steps, rates = 0, []
    for _ in range(2):
        model.train()
        for step, batch in enumerate(loader):
            accelerator.backward(loss_of(model, batch) / accumulation)
            if step % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                steps += 1
                rates.append(scheduler.get_last_lr()[0])
        model.eval()
        for batch in evaluated:
            accelerator.gather_for_metrics(model(batch["x"]))
    return steps, rates


def example_with_one_cycle(split_batches: bool) -> Trace:
    """As accelerate's example for images: a schedule that knows its end."""
    config = accelerate.DataLoaderConfiguration(split_batches=split_batches)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    model, loader = (
        make_model(),
        make_loader(batch_size=BATCH_SIZE * (accelerator.num_processes if split_batches else 1)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / 25)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for _ in range(2):
        model.train()
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    return len(rates), rates


def two_loaders() -> Trace:
    """Trains on two loaders in turns, with batches of different size."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, first, second = make_model(), make_loader(), make_loader(batch_size=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, first, second, scheduler = accelerator.prepare(model, optimizer, first, second, scheduler)
    lengths, rates = [len(first), len(second)], []
    for loader in (first, second, first):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    assert len(rates) == 2 * lengths[0] + lengths[1]
    return len(rates), rates


def in_budget(batches: int, drop_last: bool) -> Trace:
    accelerator = accelerate.Accelerator(cpu=True)
    model, loader = make_model(), DataLoader(Rows(), batch_sampler=InBudget(batches, drop_last))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps, []


LOOPS: dict[str, tuple[Callable[..., Trace], dict[str, Any]]] = {
    "no trainer": (no_trainer, {"accumulation": 1}),
    "no trainer, accumulating": (no_trainer, {"accumulation": 2}),
    "no trainer, last batch dropped": (no_trainer, {"accumulation": 1, "drop_last": True}),
    "language model": (language_model_without_trainer, {"accumulation": 2}),
    "example": (example, {"accumulation": 1}),
    "example, accumulating": (example, {"accumulation": 2}),
    "one cycle": (example_with_one_cycle, {"split_batches": False}),
    "one cycle, split batches": (example_with_one_cycle, {"split_batches": True}),
    "two loaders": (two_loaders, {}),
    "batch sampler without a batch size": (in_budget, {"batches": 11, "drop_last": False}),
    "batch sampler without a batch size, last batch dropped": (in_budget, {"batches": 11, "drop_last": True}),
}


def run_stock(name: str) -> Trace:
    loop, options = LOOPS[name]
    trace = loop(**options)
    assert accelerate.state.PartialState().num_processes == int(os.environ["WORLD_SIZE"])
    return trace


def run_ours(name: str, plan: str) -> Trace:
    os.environ["ACCELERATE_LSHDP_PLAN"] = plan
    loop, options = LOOPS[name]
    with every_accelerator_is_ours():
        return loop(**options)


def unequal(ranks: int, strategy: str = "ddp") -> str:
    placing = {"strategy": strategy}
    if strategy == "collectives":
        placing = {"strategy": "lsdp", "intra_node": "collectives"}
    return Plan.from_batch_sizes(SIZES[ranks], **placing).to_json()


@pytest.mark.parametrize("name", LOOPS)
@cells(("ddp", (2,)), ("lsdp", (1, 1)))
def test_steps_and_learning_rates_are_those_of_plain_accelerate(workers, name, strategy, nodes):
    pool, plan = workers(sum(nodes)), unequal(sum(nodes), strategy)
    expected = pool.run(run_stock, name, timeout=TIMEOUT_SECONDS)
    found = pool.run(run_ours, name, plan, nodes=nodes, timeout=TIMEOUT_SECONDS)
    assert expected[0][0] >= (4 if sum(nodes) == 2 else 3)
    assert found == expected


# Refusals


def train_once(
    batch_size: int, split_batches: bool = False, batches: int | None = None, drop_last: bool = False
) -> int:
    """One epoch of an ordinary loop; returns its steps."""
    with every_accelerator_is_ours():
        config = accelerate.DataLoaderConfiguration(split_batches=split_batches)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
        own = {"batch_size": batch_size, "shuffle": True}
        if batches is not None:
            own = {"batch_sampler": InBudget(batches, drop_last)}
        return train_epoch(accelerator, DataLoader(Rows(), **own))


def train_epoch(accelerator: accelerate.Accelerator, loader: DataLoader) -> int:
    """Trains a new model for one epoch, with a schedule; returns the optimizer steps."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator.completed_steps


def train_with(options: dict[str, Any]) -> int:
    return train_once(**options)


ADVICE = (
    "accelerate-lshdp plan --total {total} --no-accumulation",
    "launch --keep-plan-total",
    "LSDP_KEEP_PLAN_TOTAL=1",
)
#: Sizes, how the script makes its batches, what it is told besides, the total of its batches.
REFUSED: dict[str, tuple[list[Any], dict[str, Any], str, int]] = {
    "another total": ([7, 5], {"batch_size": 4}, "the batch size 6", 8),
    "a smaller total": ([1, 3], {"batch_size": 4}, "the batch size 2", 8),
    "no batch size makes it": ([7, 6], {"batch_size": 4}, "global batches of 13 samples", 8),
    "split batches": ([7, 5], {"batch_size": 8, "split_batches": True}, "the batch size 12", 8),
    "an accumulating plan": ([(2, 2), (2, 2)], {"batch_size": 4}, "a plan that accumulates", 8),
    "an accumulating plan of another total": ([(2, 2), (4, 2)], {"batch_size": 4}, "global batches of 12 samples", 8),
    "batches of any size": ([7, 5], {"batch_size": 0, "batches": 11}, "global batches of 12 samples", 8),
    # Plain accelerate makes 6 steps, and without the last one 45 samples make 5 batches of 8.
    "batches of any size, last one dropped": (
        [5, 3],
        {"batch_size": 0, "batches": 12, "drop_last": True},
        "global batches of 8 samples",
        7,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("strategy", "nodes"), [("lsdp", (2,)), ("fsdp", (1, 1))], ids=str)
def test_a_plan_of_another_global_batch_is_refused_on_all_ranks(workers, name, strategy, nodes):
    sizes, script, told, total = REFUSED[name]
    plan = Plan.from_batch_sizes(sizes, strategy=strategy)
    environment = {"ACCELERATE_LSHDP_PLAN": plan.to_json()}
    errors: list[WorkerError | None] = workers(2).run(
        train_with, script, nodes=nodes, env=environment, timeout=TIMEOUT_SECONDS, expect_failure=True
    )
    assert None not in errors and len({error.message for error in errors}) == 1, errors
    for part in (told, *ADVICE):
        assert part.format(total=total) in errors[0].message, errors[0]


def test_a_plan_whose_total_is_kept_is_not(workers):
    environment = {
        "ACCELERATE_LSHDP_PLAN": Plan.from_batch_sizes([(4, 2), (2, 2)]).to_json(),
        "LSDP_KEEP_PLAN_TOTAL": "yes",
    }
    assert workers(2).run(train_once, 4, env=environment, timeout=TIMEOUT_SECONDS) == [math.ceil(SAMPLES / 12)] * 2


@pytest.mark.parametrize(
    ("value", "on", "message"), [("maybe", (0, 1), "expected true or false"), ("1", (1,), "total of the plan kept")]
)
def test_whether_it_is_kept_is_said_alike_everywhere(workers, value, on, message):
    environment = {"ACCELERATE_LSHDP_PLAN": unequal(2)}
    errors = workers(2).run(train_where, on, value, env=environment, timeout=TIMEOUT_SECONDS, expect_failure=True)
    assert len({error.message for error in errors}) == 1 and message in errors[0].message, errors


def train_where(ranks: tuple[int, ...], value: str) -> None:
    if int(os.environ["RANK"]) in ranks:
        os.environ["LSDP_KEEP_PLAN_TOTAL"] = value
    train_once(BATCH_SIZE)


# Any total: loops that name LSHDPAccelerator


def notices_of_schedules() -> list[str]:
    """A list to which they are added from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("accelerate_lshdp.accelerator.schedule_notice").addHandler(handler)
    return told


def own_loop() -> tuple[dict[str, list[int]], int, list[str]]:
    """The lengths of a shuffled and of another loader along a script, the steps of an epoch, and what was told."""
    told = notices_of_schedules()
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([7, 5], strategy="ddp"))
    model, first, second = make_model().eval(), make_loader(), make_loader(shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    alone = accelerator.prepare(make_loader())
    lengths = {"without an optimizer": [len(alone)]}
    model, optimizer, first, second, scheduler = accelerator.prepare(model, optimizer, first, second, scheduler)
    lengths["in eval mode, as loaded"] = [len(first), len(second)]
    with accelerator.evaluation():
        lengths["said to be evaluated"] = [len(first), len(second)]
    model.train()
    lengths["training"] = [len(first), len(second)]
    for batch in first:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    lengths["in eval mode, after an epoch"] = [len(first), len(second)]
    assert sum(1 for _ in first) == math.ceil(SAMPLES / 8)
    lengths["evaluated"] = [len(first), len(second)]
    return lengths, accelerator.completed_steps, told


def test_lengths_are_those_of_training_until_a_loader_is_evaluated(workers):
    training, evaluation = math.ceil(SAMPLES / 12), math.ceil(SAMPLES / 8)
    outcomes = workers(2).run(own_loop, timeout=TIMEOUT_SECONDS)
    for lengths, steps, _ in outcomes:
        assert lengths == {
            "without an optimizer": [evaluation],
            "in eval mode, as loaded": [training, evaluation],
            "said to be evaluated": [evaluation, evaluation],
            "training": [training, training],
            "in eval mode, after an epoch": [training, evaluation],
            "evaluated": [evaluation, evaluation],
        }
        assert steps == training
    (warning,) = [text for text in outcomes[0][2] if "schedule" in text]  # the main process says it
    assert f"an epoch has {training}, so {2 * training} of the schedule" in warning


def accumulating_loop(drop_last: bool) -> tuple[int, list[str]]:
    """Optimizer steps of an epoch of a loop that accumulates three batches, and what it is told of its schedule."""
    told = notices_of_schedules()
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes([7, 5], strategy="ddp"), gradient_accumulation_steps=3, cpu=True
    )
    return train_epoch(accelerator, make_loader(drop_last=drop_last)), told


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_told_length_of_a_schedule_is_that_of_the_epoch(workers, drop_last):
    steps, told = workers(2).run(accumulating_loop, drop_last, timeout=TIMEOUT_SECONDS)[0]
    assert f"an epoch has {steps}, so {2 * steps} of the schedule" in told[0]
