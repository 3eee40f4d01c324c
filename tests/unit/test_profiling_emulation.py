# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The emulated slow rank, on a clock that the tests move."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_lshdp.profiling import Slowdown


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
