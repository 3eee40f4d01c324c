# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is made of measurements: repeats on a clock that tests move, parts of a backward, and the network's line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.planning import TimeCurve
from accelerate_lshdp.profiling.network import all_reduce_sizes, fit_message_times
from accelerate_lshdp.profiling.readiness import ReadyFractions, readiness_order
from accelerate_lshdp.profiling.repeats import LEAST_SECONDS, Repeats, measure_repeatedly


class Machine:
    """Runs micro-batches on a clock of its own; ``disturbed(run)`` is the factor of the run of that number."""

    def __init__(self, seconds: Mapping[int, float], disturbed: Callable[[int], float] = lambda run: 1.0) -> None:
        self.seconds = seconds
        self.disturbed = disturbed
        self.clock = 0.0
        self.runs: list[tuple[int, int]] = []

    def run(self, size: int, count: int) -> float:
        took = count * self.seconds[size] * self.disturbed(len(self.runs))
        self.runs.append((size, count))
        self.clock += took
        return took

    def measure(self, budget: float = 1e9, expected: Mapping[int, float] | None = None, **options) -> dict:
        return measure_repeatedly(self.run, expected or self.seconds, remaining=lambda: budget - self.clock, **options)


# ---- repeats --------------------------------------------------------------------------------------------------------


def test_quiet_sizes_are_measured_three_times_in_turn() -> None:
    machine = Machine({1: 0.5, 2: 1.0})
    repeats = machine.measure()
    assert machine.runs == [(1, 1), (2, 1)] * 3
    assert {size: one.median for size, one in repeats.items()} == {1: 0.5, 2: 1.0}
    assert all(one.spread == 0 for one in repeats.values())


def test_short_micro_batches_run_back_to_back() -> None:
    machine = Machine({1: 0.01, 2: 0.1, 4: 0.3})
    repeats = machine.measure()
    assert machine.runs[:3] == [(1, 25), (2, 3), (4, 1)]
    assert repeats[1].median == pytest.approx(0.01)


def test_a_trial_that_was_too_slow_does_not_make_a_measurement_too_short() -> None:
    machine = Machine({1: 0.01})
    machine.measure(expected={1: 0.1})  # first calls are slow
    first = [count for _, count in machine.runs[:2]]
    assert first == [3, 22] and sum(first) * 0.01 >= LEAST_SECONDS


def test_measuring_goes_on_until_the_spread_is_small() -> None:
    # Two of three rounds are disturbed at first, then the machine is quiet.
    machine = Machine({1: 1.0}, lambda run: [1.0, 1.2, 1.4][run] if run < 3 else 1.0)
    repeats = machine.measure()[1]
    assert len(repeats.seconds) == 5
    assert repeats.median == 1.0 and repeats.spread < 0.02


def test_only_sizes_that_are_not_quiet_are_measured_again() -> None:
    noise = {1: cycle([1.0]), 2: cycle([1.0, 1.3, 0.7, 1.0, 1.0, 1.0, 1.0])}
    runs: Counter[int] = Counter()

    def run(size: int, count: int) -> float:
        runs[size] += 1
        return size * next(noise[size])

    measure_repeatedly(run, {1: 1.0, 2: 2.0}, remaining=lambda: 1e9)
    assert runs == {1: 3, 2: 5}


def test_the_median_is_kept_when_the_time_is_spent() -> None:
    machine = Machine({1: 1.0, 4: 4.0}, lambda run: 1.0 + run % 5)
    repeats = machine.measure(budget=60)
    assert 55 < machine.clock <= 60 + 5 * 4  # one measurement late at most
    assert len(repeats[4].seconds) >= 3 and repeats[4].spread > 0.02


def test_every_size_is_measured_at_least_once() -> None:
    machine = Machine({1: 1.0, 2: 2.0, 4: 4.0})
    repeats = machine.measure(budget=0.0)
    assert machine.runs == [(1, 1), (2, 1), (4, 1)]
    assert all(one.seconds for one in repeats.values())


def test_a_quiet_rank_keeps_the_machine_busy_while_others_measure() -> None:
    machine = Machine({1: 1.0, 2: 2.0})
    asked = []

    def others_measure() -> bool:
        asked.append(machine.clock)
        return len(asked) < 4

    repeats = machine.measure(others_measure=others_measure)
    assert asked == [9.0, 12.0, 15.0, 18.0]
    assert len(repeats[1].seconds) == 6
    # And it ends with the time, whatever the others do.
    machine = Machine({1: 1.0})
    machine.measure(budget=10, others_measure=lambda: True)
    assert machine.clock == 10


def test_spread_is_the_median_deviation() -> None:
    assert Repeats([1.0, 1.0, 1.1, 5.0, 0.9]).spread == pytest.approx(0.1)
    assert not Repeats([1.0, 1.0]).quiet and Repeats([1.0, 1.0, 1.0]).quiet


# ---- readiness ------------------------------------------------------------------------------------------------------


def test_readiness_is_a_part_of_the_measured_time() -> None:
    fractions = ReadyFractions()
    fractions.add(1, [0.5, 0.9], 1.0)
    fractions.add(1, [1.5, 2.7], 3.0)  # the same parts of a run that was disturbed
    fractions.add(1, [0.6, 0.9], 1.0)
    fractions.add(4, [1.4, 2.0], 2.0)
    curves = fractions.curves({1: 1.0, 2: 1.2, 4: 2.0})
    assert curves[0].batch_sizes == (1, 2, 4)
    assert curves[0].seconds == pytest.approx([0.5, 1.2 * (0.5 + 0.2 / 3), 1.4])
    assert curves[1].seconds == pytest.approx([0.9, 1.2 * (0.9 + 0.1 / 3), 2.0])


def test_backwards_with_different_buckets_are_refused() -> None:
    fractions = ReadyFractions()
    fractions.add(1, [0.5, 0.9], 1.0)
    fractions.add(2, [0.5], 1.0)
    with pytest.raises(RuntimeError, match=r"found \[1, 2\] gradient buckets"):
        fractions.curves({1: 1.0, 2: 1.0})


def test_the_ends_of_a_curve_come_first() -> None:
    assert readiness_order([1, 2, 4, 8]) == [8, 1, 4, 2]
    assert readiness_order([1]) == [1]


# ---- the network ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    latency=st.floats(1e-6, 1e-1),
    cost=st.floats(1e-12, 1e-6),
    sizes=st.lists(st.integers(1, 10**9), min_size=2, max_size=8, unique=True),
)
def test_an_exact_line_is_recovered(latency: float, cost: float, sizes: list[int]) -> None:
    points = [(size, latency + cost * size) for size in sizes]
    fit = fit_message_times(points)
    for size, seconds in points:
        assert fit.seconds(size) == pytest.approx(seconds, rel=1e-4)
    assert fit.points == tuple(points)


def test_latency_and_bandwidth_of_a_gigabit() -> None:
    fit = fit_message_times([(size, 2e-4 + size / 125e6) for size in (64, 65_536, 1_048_576)])
    assert fit.latency_seconds == pytest.approx(2e-4, rel=1e-9)
    assert fit.seconds_per_byte == pytest.approx(8e-9, rel=1e-9)


def test_small_messages_decide_the_latency() -> None:
    """An absolute fit would take a latency of about a second from the error of the large message."""
    fit = fit_message_times([(64, 1e-4), (1024, 1e-4), (10**8, 2.0), (2 * 10**8, 3.0)])
    assert fit.latency_seconds == pytest.approx(1e-4, rel=0.1)


@settings(deadline=None, max_examples=200)
@given(points=st.lists(st.tuples(st.integers(1, 10**8), st.floats(1e-6, 10.0)), min_size=1, max_size=8))
def test_no_line_is_negative(points: list[tuple[int, float]]) -> None:
    fit = fit_message_times(points)
    assert fit.latency_seconds >= 0 and fit.seconds_per_byte >= 0
    assert fit.seconds(10**6) > 0


def test_times_that_fall_with_the_size_give_a_latency_only() -> None:
    fit = fit_message_times([(1000, 2.0), (10_000, 1.0)])
    assert fit.seconds_per_byte == 0 and 1.0 < fit.latency_seconds < 2.0
    with pytest.raises(ValueError, match="no measured points"):
        fit_message_times([])


def test_sizes_of_the_sweep() -> None:
    assert all_reduce_sizes(100_003) == [1024, 8192, 65_536, 100_000]
    assert all_reduce_sizes(0) == [1024]


def test_curves_from_parts_are_curves() -> None:
    fractions = ReadyFractions()
    fractions.add(1, [1.2], 1.0)  # clocks are read one after the other: a part is never above the whole
    assert fractions.curves({1: 0.3}) == [TimeCurve((1,), (0.3,))]
