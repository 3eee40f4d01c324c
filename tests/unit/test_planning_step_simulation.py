# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Playing a step through, against answers by hand, the planner's formula, and a simulation in tiny time steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.planning.cost.step_simulation import Processors, Segment, Transfer, simulate_step


def step(seconds: list[list[float]], transfers: list[Transfer], needs: Sequence[int | None] = ()) -> tuple:
    """Segments of one rank a node: `seconds` has one row a segment."""
    needs = list(needs) or [None] * len(seconds)
    segments = [Segment(tuple(row), need) for row, need in zip(seconds, needs, strict=True)]
    return segments, transfers, list(range(len(seconds[0])))


def in_tiny_steps(
    segments: Sequence[Segment],
    transfers: Sequence[Transfer],
    node_of_rank: Sequence[int],
    processors: Sequence[Processors] | None = None,
    tick: float = 1e-3,
) -> float:
    """The same rules written down for every tick, one rank a node."""
    count = len(node_of_rank)
    processors = processors or [Processors()] * count
    crowd_cores = sum(node.crowded_cores for node in processors)
    credit = [0.0] * count
    for _ in range(2 if any(node.credit_seconds() for node in processors) else 1):
        place, left = [0] * count, [list(segment.seconds) for segment in segments]
        turn, rest, now = 0, 1.0, 0.0
        while turn < len(transfers) or min(place) < len(segments):
            ready = [
                place[rank] < len(segments)
                and (segments[place[rank]].needs is None or segments[place[rank]].needs < turn)
                for rank in range(count)
            ]
            wanted = sum(node.quota_cores for node, computes in zip(processors, ready, strict=True) if computes)
            full = [1.0 if wanted > crowd_cores else node.quota_speed for node in processors]
            has, peak = [], []
            for rank, node in enumerate(processors):
                left_for_later = node.credit_seconds() - node.credit_seconds(sum(ready))
                peak.append(max(full[rank], node.peak_beside(sum(ready))))
                has.append(peak[rank] if credit[rank] - left_for_later > 1e-9 else full[rank])
            moves = turn < len(transfers) and min(place) > transfers[turn].after
            done = 0.0
            if moves:
                slowest = transfers[turn].wire_seconds
                for node, load in enumerate(transfers[turn].load_seconds):
                    slowest = max(slowest, load / ((0.5 if ready[node] else 1.0) * has[node]))
                done = tick / slowest if slowest > 0 else 1.0
                rest -= done
            for rank, node in enumerate(processors):
                used = done * transfers[turn].load_seconds[rank] if moves else 0.0
                speed = 0.0
                if ready[rank]:
                    speed = min(peak[rank] * tick, has[rank] * tick - used)
                    left[place[rank]][rank] -= speed
                    if left[place[rank]][rank] <= 0:
                        place[rank] += 1
                saved = credit[rank] + full[rank] * tick - used - speed
                credit[rank] = min(node.credit_seconds(), max(0.0, saved))
            if moves and rest <= 1e-9:
                turn, rest = turn + 1, 1.0
            now += tick
    return now


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
    # Nobody is stopped whose quota has something left.
    segments = [Segment((0.2,)), Segment((0.1,), needs=0)]
    saved = [Processors.under_quota(0.5, 1, 1.0)]

    def seconds(held_back: float, processors: list[Processors] | None) -> float:
        second = Transfer(0.05, (0.0,), after=0, held_back_seconds=held_back)
        return simulate_step(segments, [Transfer(0.1, (0.0,), after=0), second], [0], processors).seconds

    assert seconds(9.0, saved) == seconds(0.0, saved)
    assert seconds(0.0, None) == pytest.approx(0.2 + 0.1 + 0.1)
    assert seconds(9.0, None) == pytest.approx(0.2 + 0.1 + 0.1 + 0.05 * (1 - 0.1 / 9.05))


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


def test_a_quota_gives_back_what_was_not_used() -> None:
    # Rank 0 has half a core. It waits for 0.1 s, which its quota keeps: then it computes twice as fast until it has
    # used 0.1 s of its own time more than passed, which is after 0.1 s; 0.2 s of its work are done by then.
    segments = [Segment((0.2,)), Segment((1.0,), needs=0)]
    transfers = [Transfer(0.1, (0.0,), after=0)]
    without = simulate_step(segments, transfers, [0])
    kept = simulate_step(segments, transfers, [0], [Processors.under_quota(0.5, 1, 1.0)])
    assert without.seconds == pytest.approx(1.3)
    assert kept.seconds == pytest.approx(0.2 + 0.1 + 0.1 + 0.8)
    # At most half of the quota's period, on average.
    short = simulate_step(segments, transfers, [0], [Processors.under_quota(0.5, 1, 0.04)])
    assert short.seconds == pytest.approx(1.3 - 0.02)
    assert Processors.under_quota(4.0, 2, 0.1) == Processors(1.0, 0.0, 2.0)  # what its ranks can use


def test_nodes_that_compute_share_a_machine() -> None:
    nodes = [Processors.under_quota(quota, 1, 0.1, machine_cores=2) for quota in (0.25, 0.8)]
    assert [node.peak for node in nodes] == pytest.approx([4.0, 1.25])
    # Beside three others half a core is what each of them can count on.
    assert [node.peak_beside(4) for node in nodes] == pytest.approx([2.0, 1.0])
    assert [node.credit_seconds(4) for node in nodes] == pytest.approx([0.05, 0.0])
    assert [node.credit_seconds() for node in nodes] == pytest.approx([0.075, 0.02])


def test_a_node_gets_all_of_its_quota_when_others_wait() -> None:
    # Both together want more than the machine gives. When the first one is done, at 1, the second one has 4 s to go.
    crowded = [Processors(quota_cores=1.0, crowded_cores=0.9), Processors(quota_cores=0.5, crowded_cores=0.4)]
    played = simulate_step([Segment((1.0, 5.0))], [], [0, 1], crowded)
    assert played.seconds == pytest.approx(1 + 4 * 0.4 / 0.5)
    # A machine that has enough for all of them changes nothing.
    enough = [Processors(quota_cores=1.0, crowded_cores=1.0), Processors(quota_cores=0.5, crowded_cores=0.5)]
    assert simulate_step([Segment((1.0, 5.0))], [], [0, 1], enough).seconds == pytest.approx(5)


def test_what_cannot_be_used_beside_others_is_used_after_them() -> None:
    """Two nodes with half a core each, of one core: only the one that computes alone is faster than its quota.

    Before, both have waited long enough to save what half a period leaves.
    """
    nodes = [Processors.under_quota(0.5, 1, 1.0, machine_cores=1)] * 2
    segments, wait = [Segment((0.1, 0.1)), Segment((1.0, 3.0), needs=0)], [Transfer(5.0, (0.0, 0.0), after=0)]
    assert [nodes[0].credit_seconds(count) for count in (1, 2)] == pytest.approx([0.5, 0.0])
    played = simulate_step(segments, wait, [0, 1], nodes)
    assert played.seconds == pytest.approx(0.1 + 5 + 3 - 0.5)
    assert played.busy_seconds == pytest.approx([0.1 + 1.0, 0.1 + 3 - 0.5])


def seconds_under_quota(cpu_seconds: float, until_refill: float, quota: float, period: float) -> float:
    """As the kernel does it: computing with the whole quota at hand, stopped when it is used until the next period."""
    now, refill, left = 0.0, until_refill, quota * period
    while cpu_seconds > (run := min(left, refill - now)):
        cpu_seconds -= run
        now, refill, left = refill, refill + period, quota * period
    return now + cpu_seconds


@pytest.mark.parametrize("quota", [0.2, 0.3, 0.5, 0.8])
def test_what_a_quota_gives_back_is_that_of_random_moments(quota: float) -> None:
    generator, period, count = random.Random(1), 0.02, 20_000
    saved = []
    for _ in range(count):
        cpu_seconds = generator.uniform(5, 6) * quota * period
        taken = seconds_under_quota(cpu_seconds, generator.random() * period, quota, period)
        saved.append(cpu_seconds / quota - taken)
    assert Processors.under_quota(quota, 1, period).credit_seconds() == pytest.approx(sum(saved) / count, rel=0.02)


def test_what_cannot_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        simulate_step([Segment((1.0,), needs=0)], [Transfer(1.0, (0.0,), after=0)], [0])


def random_step(generator: random.Random, ranks: int) -> tuple[list[Segment], list[Transfer], list[int]]:
    """Segments and transfers in an order that can end."""
    count = generator.randint(1, 5)
    rows = [tuple(generator.choice([0.0, generator.uniform(0, 1)]) for _ in range(ranks)) for _ in range(count)]
    afters = sorted(generator.randint(0, count - 1) for _ in range(generator.randint(0, 4)))
    transfers = [
        Transfer(generator.uniform(0, 1), tuple(generator.uniform(0, 0.6) for _ in range(ranks)), after)
        for after in afters
    ]
    segments = []
    for place, row in enumerate(rows):
        possible = [number for number, after in enumerate(afters) if after < place]
        segments.append(Segment(row, generator.choice([None, *possible[-1:]])))
    return segments, transfers, list(range(ranks))


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_simulation_in_tiny_steps(seed: int) -> None:
    generator = random.Random(seed)
    ranks = generator.randint(1, 3)
    played = random_step(generator, ranks)
    quotas = None
    if seed % 2:
        shares = [generator.uniform(0.2, 1) for _ in range(ranks)]
        crowded = generator.choice([0.0, 0.8])
        quotas = [Processors.under_quota(share, 1, 0.3, sum(shares), crowded * share) for share in shares]
    exact = simulate_step(*played, quotas).seconds
    assert exact == pytest.approx(in_tiny_steps(*played, quotas), abs=0.03)


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
