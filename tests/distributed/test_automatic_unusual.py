# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Automatic batch sizes in scripts beside the plain loop: sizes follow speed, and what is trained stays the same.

As in `test_automatic`, the ranks are equally fast, and what they measure is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.runtime.step_exchange import RankReport


TIMEOUT_SECONDS = 45
TOTAL = 16
SPEEDS = (30.0, 10.0)


def accelerator_of(automatic: bool = True, speeds: tuple[float, ...] = SPEEDS, **options: Any) -> LSHDPAccelerator:
    """With automatic sizes or equal ones, and a clock that says how long ranks of these speeds would compute."""
    set_seed(5)
    if automatic:
        plan = Plan.auto(TOTAL, strategy="ddp", rebalance_every=5)
    else:
        plan = Plan.from_batch_sizes([TOTAL // len(speeds)] * len(speeds), strategy="ddp")
    accelerator = LSHDPAccelerator(plan=plan, **options)
    timer = accelerator.session.timer

    def backward_ends() -> RankReport:
        place = accelerator.batch_place
        rank = accelerator.process_index
        timer._compute += 0.01 + place.cut.sizes[rank] / place.micro_batches / speeds[rank]
        return RankReport(timer._compute, wait_seconds=0.0, optimizer_seconds=0.001, data_seconds=0.0)

    timer.backward_ends = backward_ends
    return accelerator


def layer(seed: int, features: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, features).double()


def data(samples: int, seed: int = 0, **options: Any) -> DataLoader:
    if options.get("num_workers"):
        # Workers begun again and again: a child forked from a process with threads, which gloo brings, now and then
        # hangs on a lock that one of them held.
        options["multiprocessing_context"] = "forkserver"
    generator = torch.Generator().manual_seed(seed)
    dataset = TensorDataset(torch.randn(samples, 4, generator=generator, dtype=torch.float64))
    return DataLoader(dataset, batch_size=4, drop_last=True, **options)


def cycle(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def result(accelerator: LSHDPAccelerator, *modules: nn.Module) -> tuple[list[torch.Tensor], list[int], int]:
    weights = [parameter.detach().clone() for module in modules for parameter in module.parameters()]
    return weights, accelerator.plan.batch_sizes, len(accelerator.batch_size_decisions)


def adapted_and_exact(automatic: list[tuple], fixed: list[tuple]) -> None:
    """All ranks have the same sizes and weights, those of a run with equal sizes."""
    for weights, sizes, _ in automatic:
        assert sizes == automatic[0][1] and sizes[0] in (11, 12, 13), automatic
        for mine, other in zip(weights, fixed[0][0], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def both(workers: Any, function: Any, *args: Any) -> tuple[list[tuple], list[tuple]]:
    pool = workers(len(SPEEDS))
    return tuple(pool.run(function, kind, *args, nodes=(1, 1), timeout=TIMEOUT_SECONDS) for kind in (True, False))


def two_loaders(automatic: bool, short_first: bool) -> tuple:
    accelerator = accelerator_of(automatic)
    model = layer(0)
    options = {"num_workers": 1, "prefetch_factor": 4} if automatic else {}
    model, optimizer, long, short = accelerator.prepare(
        model, sgd(model), data(TOTAL * 40, seed=1, **options), data(TOTAL * 7, seed=2, **options)
    )
    model.train()
    if short_first:
        pairs = zip(cycle(short), long, strict=False)
    else:
        pairs = zip(long, cycle(short), strict=False)
    for (one,), (two,) in islice(pairs, 30):
        optimizer.zero_grad()
        accelerator.backward(model(one).square().mean() + model(two).mean())
        optimizer.step()
    return result(accelerator, model)


@pytest.mark.slow
@pytest.mark.parametrize("short_first", [False, True])
def test_a_loader_that_begins_anew_beside_another_has_the_same_sizes(workers, short_first):
    adapted_and_exact(*both(workers, two_loaders, short_first))


def adversaries(automatic: bool, first: str) -> tuple:
    accelerator = accelerator_of(automatic)
    generator, critic = layer(1), layer(2, features=1)
    optimizers = {"critic": sgd(critic), "generator": sgd(generator)}
    order = [first, *(name for name in optimizers if name != first)]
    generator, critic, loader, *prepared = accelerator.prepare(
        generator, critic, data(TOTAL * 12), *(optimizers[name] for name in order)
    )
    optimizers = dict(zip(order, prepared, strict=True))
    generator.train(), critic.train()
    for _ in range(2):
        for (batch,) in loader:
            optimizers["critic"].zero_grad()
            accelerator.backward(critic(generator(batch).detach()).square().mean() + critic(batch).mean())
            optimizers["critic"].step()
            optimizers["generator"].zero_grad()
            accelerator.backward(-critic(generator(batch)).mean())
            optimizers["generator"].step()
    if automatic:
        # Both optimizers' turns at a batch count, whichever was prepared first.
        measured = accelerator.batch_size_decisions[0].measured_seconds
        expected = [2 * (0.01 + TOTAL / len(SPEEDS) / speed + 0.001) for speed in SPEEDS]
        # Ranks tell each other seconds in fp32.
        torch.testing.assert_close(list(measured), expected, rtol=1e-7, atol=0)
    return result(accelerator, generator, critic)


@pytest.mark.parametrize("first", ["critic", "generator"])
def test_two_optimizers_on_one_batch(workers, first):
    adapted_and_exact(*both(workers, adversaries, first))


def two_phases(automatic: bool) -> tuple:
    accelerator = accelerator_of(automatic)
    one, two = layer(1), layer(2)
    one, two, warm_up, optimizer, loader = accelerator.prepare(one, two, sgd(one), sgd(two), data(TOTAL * 24))
    one.train(), two.train()
    for number, (batch,) in enumerate(loader):
        model, active = (one, warm_up) if number < 2 else (two, optimizer)
        active.zero_grad()
        accelerator.backward(model(batch).square().mean())
        active.step()
    return result(accelerator, one, two)


def test_the_first_optimizer_steps_no_more(workers):
    adapted_and_exact(*both(workers, two_phases))


def evaluation_within(automatic: bool) -> tuple:
    accelerator = accelerator_of(automatic)
    model = layer(0)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(TOTAL * 24))
    model.train()
    used = set()
    for number, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        used.add(accelerator.batch_place.cut.sizes[0])
        if number == 3:
            model.eval()
            for (seen,) in loader:
                model(seen)
            model.train()
    assert len(used) > 1 or not automatic, used
    return result(accelerator, model)


def test_an_evaluation_pass_over_the_training_loader(workers):
    adapted_and_exact(*both(workers, evaluation_within))


def fetches_before_the_step(automatic: bool, num_workers: int) -> tuple:
    accelerator = accelerator_of(automatic)
    model = layer(0)
    options = {"num_workers": 1, "prefetch_factor": 3} if num_workers and automatic else {}
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(TOTAL * 6, **options))
    model.train()
    batches = cycle(loader)
    (batch,) = next(batches)
    for _ in range(30):
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        (batch,) = next(batches)
        optimizer.step()
    return result(accelerator, model)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_next_batch_is_fetched_before_the_step(workers, num_workers):
    adapted_and_exact(*both(workers, fetches_before_the_step, num_workers))


def leaves_early(automatic: bool) -> tuple:
    accelerator = accelerator_of(automatic)
    model = layer(0)
    options = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True} if automatic else {}
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(TOTAL * 20, **options))
    model.train()
    kept = iter(loader)
    next(kept)
    for epoch in range(6):
        for number, (batch,) in enumerate(loader):
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            if epoch == 3 and number == 1:
                kept = None
            if number == 5:
                break
    return result(accelerator, model)


@pytest.mark.slow
def test_epochs_that_are_left_early(workers):
    adapted_and_exact(*both(workers, leaves_early))


def windows_across_epochs(automatic: bool) -> tuple:
    accumulation = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = accelerator_of(automatic, gradient_accumulation_plugin=accumulation)
    model = layer(0)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(TOTAL * 7))
    model.train()
    for (batch,) in islice(cycle(loader), 50):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return result(accelerator, model)


def test_steps_that_go_on_in_the_next_epoch(workers):
    adapted_and_exact(*both(workers, windows_across_epochs))


def gradients_summed_by_the_script(automatic: bool) -> tuple:
    accelerator = accelerator_of(automatic)
    model = layer(0)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(TOTAL * 48))
    model.train()
    for number, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).square().mean() / 2)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return result(accelerator, model)


def test_gradients_that_the_script_sums(workers):
    adapted_and_exact(*both(workers, gradients_summed_by_the_script))


# What must never go on unnoticed


def differs_on_one_rank() -> None:
    accelerator = accelerator_of()
    model = layer(0)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(TOTAL * 8))
    model.train()
    for number, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        if number == 2 and accelerator.process_index == 1:
            loader.switch_sizes(Plan.from_batch_sizes([7, 9]).batch.ranks, ahead=0)


def test_ranks_that_train_with_different_sizes_stop_together(workers):
    errors = workers(2).run(differs_on_one_rank, nodes=(1, 1), timeout=TIMEOUT_SECONDS, expect_failure=True)
    assert errors[0].type == errors[1].type == "RuntimeError"
    for error in errors:
        assert "rank 0: trained with batch sizes [[8, 8]]" in error.message, error
        assert "rank 1: trained with batch sizes [[7, 9]]" in error.message, error


def start_with_curves_of_one_node(speed_of_second: tuple[float, float]) -> None:
    rank = int(os.environ["RANK"])
    ranks = [
        {"rank": 0, "batch_sizes": [1, 8], "seconds": [0.1, 0.8], "max_micro_batch_size": 8},
        {"rank": 1, "batch_sizes": [1, 8], "seconds": [0.1, speed_of_second[rank]], "max_micro_batch_size": 8},
    ]
    LSHDPAccelerator(plan=Plan.from_dict({**Plan.auto(8).to_dict(), "profile": {"ranks": ranks}}))


def test_nodes_with_different_curves_stop_at_the_start(workers):
    pool = workers(2)
    pool.run(start_with_curves_of_one_node, (0.5, 0.5), nodes=(1, 1), timeout=TIMEOUT_SECONDS)
    errors = pool.run(
        start_with_curves_of_one_node, (0.5, 0.6), nodes=(1, 1), timeout=TIMEOUT_SECONDS, expect_failure=True
    )
    for error in errors:
        assert "the ranks do not agree on the plan" in error.message and "measured curves" in error.message, error


def test_forwards_that_are_not_seen_are_named(caplog):
    accelerator = LSHDPAccelerator(batch_sizes="auto", total_batch_size=TOTAL, cpu=True)
    model = layer(0)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(TOTAL * 8))
    model.train()

    def train(forward) -> None:
        for (batch,) in loader:
            optimizer.zero_grad()
            accelerator.backward(forward(batch).square().mean())
            optimizer.step()

    train(model)
    assert "automatic" not in caplog.text and accelerator.plan.batch_sizes == [TOTAL]
    train(model.forward)
    assert caplog.text.count("automatic batch sizes learn nothing") == 1
