# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How long a rank is patient with the others of its node."""

from __future__ import annotations

import pytest

from accelerate_lshdp.engine.stores.shared.backward_pacing import BackwardPacing
from accelerate_lshdp.profiling.emulation import Slowdown
from accelerate_lshdp.runtime.wait_clock import WaitClock


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def backward(
    keeping: BackwardPacing, time: Time, seconds: float, waits: float = 0.0, timed_out: bool = False
) -> float:
    """The patience at its beginning."""
    keeping.begin()
    patience = keeping.patience
    if waits:
        keeping.waited(waits, timed_out)
    time.now += seconds
    keeping.finish()
    return patience


def test_patience_is_a_second_and_what_the_last_backward_took_and_is_used_up(time):
    keeping = BackwardPacing(lambda: True, time)
    assert backward(keeping, time, 3.0) == 1.0
    keeping.begin()
    assert keeping.patience == 4.0
    keeping.waited(1.5, False)
    assert keeping.patience == 2.5
    keeping.waited(2.5, True)
    assert keeping.patience == 0.0


def test_shares_of_processors_are_looked_at_again_after_five_seconds(time):
    answers = iter([False, True, False])
    keeping = BackwardPacing(lambda: next(answers), time)
    assert [backward(keeping, time, 2.0) for _ in range(9)] == [0.0] * 3 + [3.0] * 3 + [0.0] * 3


def test_after_three_backwards_in_vain_in_a_row_it_waits_no_more(time):
    keeping = BackwardPacing(lambda: True, time)
    for _ in range(2):
        assert backward(keeping, time, 1.0, waits=1.0, timed_out=True) > 0
    assert backward(keeping, time, 1.0, waits=0.5) > 0
    for _ in range(3):
        assert backward(keeping, time, 1.0, waits=1.0, timed_out=True) > 0
    assert backward(keeping, time, 1.0) == 0.0


def test_what_a_rank_waits_in_the_middle_of_its_work_is_not_stretched(time):
    slept = []
    slowdown = Slowdown(
        [], 3.0, clock=time, sleep=lambda seconds: (slept.append(seconds), setattr(time, "now", time.now + seconds))
    )
    slowdown._begun = slowdown._now()
    time.now += 1.0
    with WaitClock(time).waiting():
        time.now += 5.0
    slowdown._stretch()
    time.now += 2.0
    slowdown._stretch()
    assert slept == pytest.approx([2.0, 4.0])
