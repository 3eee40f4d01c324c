# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Playing a step through, against answers by hand, the planner's formula, and a simulation in tiny time steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_in_ticks import in_tiny_steps, random_step, step

from accelerate_lshdp.planning.cost.step_simulation import Segment, Transfer, simulate_step


def test_transfers_that_cost_nothing_overlap() -> None:
    # The first transfer may begin when the slower rank has done its first segment, at 2; it ends at 5, when both are
    # done with computing; the second one takes until 8.
    transfers = [Transfer(3.0, (0.0, 0.0), after=0), Transfer(3.0, (0.0, 0.0), after=1)]
    played = simulate_step(*step([[1.0, 2.0], [1.0, 2.0]], transfers))
    assert played.seconds == pytest.approx(8.0)
    assert played.busy_seconds == pytest.approx((2.0, 4.0))


def test_a_transfer_is_held_back_while_somebody_computes() -> None:
    # It begins at 2. Rank 1 computes until 4: by then a third of it is done, where half as much is lost as carried.
    transfers = [Transfer(3.0, (0.0, 0.0), after=0, held_back_seconds=3.0)]
    assert simulate_step(*step([[1.0, 2.0], [1.0, 2.0]], transfers)).seconds == pytest.approx(4 + 2)


def test_a_segment_waits_for_the_transfer_that_it_needs() -> None:
    played = simulate_step(*step([[1.0, 2.0], [1.0, 2.0]], [Transfer(3.0, (0.0, 0.0), after=0)], needs=[None, 0]))
    assert played.seconds == pytest.approx(2 + 3 + 2)


def test_a_transfer_takes_its_part_of_a_processor_that_computes() -> None:
    # 4 s on the wire and 1 s of rank 0's processor: while it runs, rank 0 computes at 3/4 of its speed.
    played = simulate_step(*step([[1.0, 1.0], [6.0, 1.0]], [Transfer(4.0, (1.0, 0.0), after=0)]))
    assert played.seconds == pytest.approx(1 + 6 + 1)
    assert played.busy_seconds == pytest.approx((8.0, 2.0))


def test_a_transfer_gets_half_of_a_busy_processor_and_all_of_an_idle_one() -> None:
    # 4 s of rank 0's processor: beside 2 s of computing it gets half for 4 s, then all for its last 2 s.
    played = simulate_step(*step([[1.0, 1.0], [2.0, 0.0]], [Transfer(0.0, (4.0, 0.0), after=0)]))
    assert played.seconds == pytest.approx(1 + 4 + 2)


def test_transfers_of_two_lanes_share_the_wire() -> None:
    # The first one begins at 1, the other at 2, when a third of the first is done: then each gets half of the wire,
    # until the other one is done at 4, with which rank 0 goes on until 6. What is left of the first takes until 5.
    transfers = [Transfer(3.0, (0.0,), after=0, lane=1), Transfer(1.0, (0.0,), after=1)]
    played = simulate_step(*step([[1.0], [1.0], [2.0]], transfers, needs=[None, None, 1]))
    assert played.seconds == pytest.approx(6.0)
    # Without a lane of its own the second one waits for the first, and so does the rank.
    one_lane = [transfers[1], Transfer(3.0, (0.0,), after=0)][::-1]
    assert simulate_step(*step([[1.0], [1.0], [2.0]], one_lane, needs=[None, None, 1])).seconds == pytest.approx(7.0)


def test_what_cannot_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        simulate_step([Segment((1.0,), needs=0)], [Transfer(1.0, (0.0,), after=0)], [0])


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_simulation_in_tiny_steps(seed: int) -> None:
    generator = random.Random(seed)
    played = random_step(generator, generator.randint(1, 3))
    assert simulate_step(*played).seconds == pytest.approx(in_tiny_steps(*played), abs=0.03)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    ready=st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3).map(sorted), min_size=1, max_size=4),
    costs=st.lists(st.floats(0, 5), min_size=3, max_size=3),
)
def test_equals_the_planner_where_transfers_cost_no_processor(ready: list[list[float]], costs: list[float]) -> None:
    # T = max_i max_j [r_ij + sum over l >= j of c_l]
    rows = [[times[0] for times in ready]]
    rows += [[times[j] - times[j - 1] for times in ready] for j in (1, 2)]
    transfers = [Transfer(cost, (0.0,) * len(ready), after) for after, cost in enumerate(costs)]
    expected = max(times[j] + sum(costs[j:]) for times in ready for j in range(3))
    assert simulate_step(*step(rows, transfers)).seconds == pytest.approx(expected, abs=1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 3), factor=st.floats(1, 4))
def test_bounds_and_more_to_send_is_never_faster(seed: int, ranks: int, factor: float) -> None:
    segments, transfers, nodes = random_step(random.Random(seed), ranks)
    played = simulate_step(segments, transfers, nodes)
    for rank in range(ranks):
        work = sum(segment.seconds[rank] for segment in segments)
        assert played.seconds >= work + sum(transfer.load_seconds[rank] for transfer in transfers) - 1e-9
        assert work - 1e-9 <= played.busy_seconds[rank] <= played.seconds + 1e-9
    assert played.seconds >= sum(transfer.wire_seconds for transfer in transfers) - 1e-9
    larger = [
        Transfer(factor * t.wire_seconds, tuple(factor * load for load in t.load_seconds), t.after) for t in transfers
    ]
    assert simulate_step(segments, larger, nodes).seconds >= played.seconds - 1e-9
