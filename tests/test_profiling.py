# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measuring a rank: what counts and what does not, on a clock that the tests move."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_lshdp.planning import RankProfile, TimeCurve
from accelerate_lshdp.profiling import (
    MicroBatchTrainer,
    Slowdown,
    measure_time_curve,
    probe_sizes,
    read_profiles,
    write_profiles,
)


class Clock:
    """Seconds that pass only when something is said to take them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.too_long = 0.0

    def __call__(self) -> float:
        return self.seconds

    def take(self, seconds: float) -> None:
        self.seconds += seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds + self.too_long


class _TimedIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[[], None]) -> torch.Tensor:
        ctx.backward = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.backward()
        return gradient, None


class TimedLinear(nn.Linear):
    """Takes 1 s a sample forward and 2 s a sample backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(4, 4)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.take(1.0 * len(x))
        samples = len(x)
        return _TimedIdentity.apply(super().forward(x), lambda: self.clock.take(2.0 * samples))


def _train(model: nn.Module, samples: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * samples).view(samples, 4).requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    return loss


# ---- curves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (63, [1, 2, 4, 8, 16, 32, 63])]
)
def test_sizes_to_probe(largest: int, sizes: list[int]) -> None:
    assert probe_sizes(largest) == sizes


def test_no_size_to_probe() -> None:
    with pytest.raises(ValueError, match="found a largest micro-batch of 0"):
        probe_sizes(0)


def test_warm_up_and_outliers_do_not_count() -> None:
    clock, calls, spent = Clock(), [], []

    def train(size: int) -> None:
        calls.append(size)
        rounds_before = calls.count(size) - 1
        # The warm-up round allocates, and one of the others is disturbed.
        clock.take({0: 100.0, 2: 50.0}.get(rounds_before, 0.5) * size)

    curve = measure_time_curve(train, [1, 2, 4], seconds=0, least_rounds=3, clock=clock, on_round=spent.append)
    assert calls == [1, 2, 4] * 4
    assert curve == TimeCurve((1, 2, 4), (0.5, 1.0, 2.0))
    assert spent == [3.5, 353.5, 357.0]


def test_measuring_goes_on_for_the_given_seconds() -> None:
    clock, calls = Clock(), []

    def train(size: int) -> None:
        calls.append(size)
        clock.take(1.0)

    measure_time_curve(train, [1, 2], seconds=9.0, least_rounds=1, warm_up_rounds=2, clock=clock)
    assert len(calls) == 2 * (2 + 5)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="found least_rounds 0"):
        measure_time_curve(lambda size: None, [1], seconds=1, least_rounds=0)


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.seen: list[tuple[int, bool]] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.append((len(x), self.training))
        return type("Output", (), {"loss": self.linear(x).mean()})


def test_micro_batches_are_trained_and_leave_no_gradient() -> None:
    model = _WithLoss().eval()
    reached = []
    model.linear.weight.register_post_accumulate_grad_hook(lambda p: reached.append(p.grad.abs().sum().item()))
    trainer = MicroBatchTrainer(model, {"x": torch.ones(6, 4)})
    trainer(2)
    trainer(6)
    assert model.seen == [(2, True), (6, True)]
    assert reached == [4.0, 4.0]  # of one micro-batch each: nothing was added up
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="found a micro-batch of 7 samples, expected 1 to 6"):
        trainer(7)


# ---- the emulated slow rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("samples", [1, 5])
def test_slowdown_is_a_factor_at_every_number_of_samples(factor: float, samples: int) -> None:
    clock = Clock()
    model = nn.Sequential(TimedLinear(clock), TimedLinear(clock))
    slowdown = Slowdown(model, factor, clock=clock, sleep=clock.sleep)
    _train(model, samples)
    assert clock.seconds == pytest.approx(factor * 2 * 3.0 * samples)
    assert slowdown.slept == pytest.approx((factor - 1) * 2 * 3.0 * samples)


def test_slowdown_sleeps_after_each_piece() -> None:
    """Ranks that share parameters meet at every piece: one long sleep at the end would make the others wait twice."""
    clock, sleeps = Clock(), []
    model = nn.Sequential(TimedLinear(clock), TimedLinear(clock))

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock.sleep(seconds)

    Slowdown(model, 2, clock=clock, sleep=sleep)
    _train(model, 4)
    assert sleeps == pytest.approx([4.0, 4.0, 8.0, 8.0])


def test_first_module_keeps_the_speed_of_its_backward() -> None:
    clock = Clock()
    model = TimedLinear(clock)
    slowdown = Slowdown([model], 2, clock=clock, sleep=clock.sleep)
    model(torch.ones(3, 4)).sum().backward()  # the input needs no gradient
    assert slowdown.slept == pytest.approx(3.0)


def test_waiting_for_others_is_not_stretched() -> None:
    """FSDP2 waits in a hook before the forward, and in the backward before the module's own; both come first."""
    clock = Clock()
    model = TimedLinear(clock)
    slowdown = Slowdown([model], 2, clock=clock, sleep=clock.sleep)

    def gather(module: nn.Module, args: tuple) -> None:
        clock.take(10.0)

    def gather_in_backward(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output.register_hook(lambda gradient: clock.take(10.0))
        return output

    model.register_forward_pre_hook(gather, prepend=True)
    model.register_forward_hook(gather_in_backward)
    _train(model, 2)
    assert slowdown.slept == pytest.approx(3.0 * 2)


def test_too_long_a_sleep_is_taken_off_the_next() -> None:
    clock = Clock()
    clock.too_long = 0.25
    model = TimedLinear(clock)
    slowdown = Slowdown([model], 2, clock=clock, sleep=clock.sleep)
    for _ in range(10):
        _train(model, 1)
    assert slowdown.slept == pytest.approx(10 * 3.0, abs=0.25)


def test_slowdown_changes_no_bit() -> None:
    clock = Clock()
    torch.manual_seed(0)
    plain = nn.Sequential(TimedLinear(clock), nn.ReLU(inplace=True), TimedLinear(clock))
    slowed = deepcopy(plain)
    Slowdown(slowed, 2, clock=clock, sleep=clock.sleep)
    assert torch.equal(_train(plain, 3), _train(slowed, 3))
    for one, other in zip(plain.parameters(), slowed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_evaluation_and_removal_give_the_speed_back() -> None:
    clock = Clock()
    model = TimedLinear(clock)
    slowdown = Slowdown([model], 2, clock=clock, sleep=clock.sleep)
    model.eval()
    _train(model, 2)
    model.train()
    slowdown.remove()
    _train(model, 2)
    assert slowdown.slept == 0


def test_impossible_slowdowns_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for factor in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected at least 1"):
            Slowdown(model, factor)
    with pytest.raises(ValueError, match="slowed twice"):
        Slowdown([model, model[0]], 2)


# ---- documents ------------------------------------------------------------------------------------------------------


def test_profiles_survive_being_written() -> None:
    profiles = [
        RankProfile(TimeCurve((1, 2, 7), (0.1, 0.15, 0.5)), 7),
        RankProfile(TimeCurve((1, 4), (1 / 3, 2 / 3)), 3),
    ]
    assert read_profiles({**write_profiles(profiles), "emulation": {"rank": 1}}) == profiles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1}, "expected rank 0"),
        ({"seconds": [0.1]}, "the profile of rank 0: found 2 batch sizes and 1 times"),
        ({"seconds": None}, "the profile of rank 0"),
        ({"max_micro_batch_size": 9}, "the profile of rank 0: found max_micro_batch_size 9"),
        ({"speed": 3}, "found .* at place 0"),
    ],
)
def test_bad_profiles_are_refused(change: dict[str, Any], message: str) -> None:
    document = write_profiles([RankProfile(TimeCurve((1, 2), (0.1, 0.2)), 2)])
    document["ranks"][0].update(change)
    with pytest.raises(ValueError, match=message):
        read_profiles(document)


def test_a_document_without_ranks_is_refused() -> None:
    for document in ({}, {"ranks": []}, {"ranks": 3}, None):
        with pytest.raises(ValueError, match="measure the ranks again"):
            read_profiles(document)
