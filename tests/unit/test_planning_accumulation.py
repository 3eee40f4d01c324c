# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Several micro-batches a rank, memory, overlap and throughput: answers that can be checked by hand, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.planning import (
    MemoryCurve,
    PlanningError,
    RankProfile,
    TimeCurve,
    plan_fixed_total,
    plan_max_throughput,
    verify_certificate,
)


def linear(seconds_per_sample: float, largest: int, **more: Any) -> RankProfile:
    return RankProfile(TimeCurve([1, largest], [seconds_per_sample, seconds_per_sample * largest]), largest, **more)


def test_accumulation_goes_beyond_the_largest_micro_batch() -> None:
    profiles = [linear(1.0, 4), linear(2.0, 4)]
    with pytest.raises(PlanningError, match="the nearest feasible total is 8"):
        plan_fixed_total(profiles, 12)
    result = plan_fixed_total(profiles, 12, allow_accumulation=True)
    # 8 s each. Of 2 x 4 and 4 x 2 samples, fewer micro-batches win.
    assert (result.micro_batches, result.step_seconds) == ([(4, 2), (4, 1)], 8.0)
    assert (result.batch_sizes, result.total_batch_size) == ([8, 4], 12)
    assert result.rank_seconds == [8.0, 8.0]
    assert (result.samples_per_second, result.idle_fraction) == (1.5, 0.0)


def test_overhead_and_optimizer_step_are_part_of_the_step_and_not_of_the_compute() -> None:
    profiles = [linear(1.0, 4, accumulation_overhead_seconds=0.5, fixed_seconds=3.0), linear(2.0, 4)]
    result = plan_fixed_total(profiles, 11, allow_accumulation=True)
    # Rank 0 takes 3 + 6 + 0.5 = 9.5 s for 2 x 3 samples, and 3 + 7 + 6 * 0.5 = 13 s for 7 x 1; rank 1 takes 10 s.
    assert (result.micro_batches, result.step_seconds) == ([(3, 2), (1, 5)], 10.0)
    assert result.rank_seconds == [6.5, 10.0]
    assert result.idle_fraction == pytest.approx(1 - (6.5 + 10.0) / 2 / 10.0)


def test_numbers_of_samples_that_no_equal_micro_batches_make() -> None:
    fast = RankProfile(TimeCurve([1, 4], [2.0, 3.0]), 4)
    alone = plan_fixed_total([fast], 13, allow_accumulation=True)
    assert (alone.micro_batches, alone.step_seconds) == ([(1, 13)], 26.0)
    assert plan_fixed_total([fast], 12, allow_accumulation=True).micro_batches == [(4, 3)]
    # 8 samples take 6 s, but the other 5 would take 10 s and 7 would take 14 s. 9 are three times 3, 8 s.
    pair = plan_fixed_total([fast, fast], 13, allow_accumulation=True)
    assert (pair.micro_batches, pair.step_seconds) == ([(4, 1), (3, 3)], 8.0)
    verify_certificate([fast, fast], pair.certificate)


def test_ranks_of_a_shard_group_have_equal_numbers_of_micro_batches() -> None:
    profiles = [linear(1.0, 2), linear(3.0, 2), linear(1.0, 2), linear(3.0, 2)]
    options = {"allow_accumulation": True}
    alone = plan_fixed_total(profiles, 16, **options)
    assert alone.step_seconds == 6.0 and alone.micro_batches == [(2, 3), (2, 1), (2, 3), (2, 1)]
    for groups in ([[0, 1], [2, 3]], [[2, 1], [3, 0]], [[0, 1, 2, 3]]):
        result = plan_fixed_total(profiles, 16, shard_groups=groups, **options)
        for group in groups:
            assert len({result.micro_batches[rank][1] for rank in group}) == 1
        assert result.step_seconds > alone.step_seconds
        verify_certificate(profiles, result.certificate)
    # Fast ranks together and slow ranks together lose nothing.
    assert (
        plan_fixed_total(profiles, 16, shard_groups=[[0, 2], [1, 3]], **options).micro_batches == alone.micro_batches
    )


def test_memory_caps_the_micro_batch() -> None:
    memory = MemoryCurve([2, 6], [100, 300])
    assert [memory(size) for size in (1, 2, 4, 6)] == [100.0, 100.0, 200.0, 300.0]
    assert [memory.largest_within(limit) for limit in (99, 100, 149, 150, 299, 300, 10**12)] == [0, 2, 2, 3, 5, 6, 6]
    # The running maximum: a size that needs less than a smaller one is out of reach all the same.
    assert MemoryCurve([1, 2, 3], [100, 300, 200]).largest_within(200) == 1
    assert MemoryCurve([1, 2, 3], [100, 300, 200])(3) == 300.0
    capped = linear(1.0, 8, memory=memory, memory_limit_bytes=150)
    assert capped.largest_micro_batch == 3
    assert linear(1.0, 2, memory=memory, memory_limit_bytes=150).largest_micro_batch == 2
    # Beyond the last measurement nothing is known. Without a limit the curve is not asked.
    assert linear(1.0, 8, memory=memory, memory_limit_bytes=999).largest_micro_batch == 6
    assert linear(1.0, 8, memory=memory).largest_micro_batch == 8
    profiles = [capped, linear(1.0, 8)]
    assert plan_fixed_total(profiles, 11).batch_sizes == [3, 8]
    with pytest.raises(PlanningError, match=r"largest micro-batches \[3, 8\]: the nearest feasible total is 11"):
        plan_fixed_total(profiles, 12)
    result = plan_fixed_total(profiles, 16, allow_accumulation=True)
    assert result.micro_batches == [(2, 4), (8, 1)]
    verify_certificate(profiles, result.certificate)


def test_a_rank_without_room_for_one_sample_is_named() -> None:
    full = linear(1.0, 8, memory=MemoryCurve([1, 8], [100, 800]), memory_limit_bytes=99)
    with pytest.raises(ValueError, match="no micro-batch fits"):
        _ = full.largest_micro_batch
    with pytest.raises(PlanningError, match="rank 1: found a memory limit of 99 bytes, expected at least 100"):
        plan_fixed_total([linear(1.0, 8), full], 4)
    with pytest.raises(PlanningError, match="rank 0: found a memory limit of 99 bytes"):
        plan_max_throughput([full])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit_bytes": 5}, "without a memory curve, expected both"),
        ({"memory": MemoryCurve([1], [5]), "memory_limit_bytes": 5.0}, "expected an integer number of bytes"),
        ({"fixed_seconds": -1.0}, "found fixed_seconds -1.0, expected finite seconds of at least 0"),
        ({"accumulation_overhead_seconds": float("nan")}, "expected finite seconds of at least 0"),
        ({"bucket_ready": [TimeCurve([1, 7], [1.0, 2.0])]}, "expected 1 to 7, the largest measured"),
    ],
)
def test_impossible_profiles_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        linear(1.0, 8, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "peaks", "message"),
    [
        ([], [], "found 0 batch sizes and 0 numbers of bytes"),
        ([2, 1], [1, 2], "strictly increasing"),
        ([1, 2], [0, 2], "expected positive numbers"),
        ([1, 2], [1.5, 2], "found 1.5 in bytes, expected an integer number of bytes"),
    ],
)
def test_bad_memory_curves_are_rejected(sizes: list, peaks: list, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        MemoryCurve(sizes, peaks)
    assert message in str(caught.value)


def test_overlapped_buckets_hide_what_the_backward_covers() -> None:
    """Two buckets of 2 s each; the first is ready after half of the time, the second at the end."""
    half, whole = TimeCurve([1, 8], [0.5, 4.0]), TimeCurve([1, 8], [1.0, 8.0])
    profiles = [linear(1.0, 8, bucket_ready=[half, whole])] * 2
    # 6 samples: ready after 3 s and 6 s, so done at max(3 + 4, 6 + 2) = 8 s. Of 2 samples at max(1 + 4, 2 + 2) = 5 s.
    result = plan_fixed_total(profiles, 12, bucket_seconds=[2.0, 2.0])
    assert (result.batch_sizes, result.step_seconds, result.rank_seconds) == ([6, 6], 8.0, [6.0, 6.0])
    assert plan_fixed_total(profiles, 4, bucket_seconds=[2.0, 2.0]).step_seconds == 5.0
    # Only the last micro-batch has gradients to send: 8 samples before it.
    result = plan_fixed_total(profiles, 32, bucket_seconds=[2.0, 2.0], allow_accumulation=True)
    assert (result.micro_batches, result.step_seconds) == ([(8, 2), (8, 2)], 8.0 + 10.0)
    verify_certificate(profiles, result.certificate)
    assert plan_fixed_total(profiles, 12).step_seconds == 6.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_seconds": [1.0]}, "rank 0: found 0 curves in bucket_ready for 1 bucket_seconds"),
        ({"bucket_seconds": [-1.0]}, "found -1.0 in bucket_seconds, expected finite seconds"),
        ({"bucket_seconds": [float("inf")]}, "found inf in bucket_seconds"),
        ({"shard_groups": [[0]]}, "expected each rank of 0 to 1 in exactly one group"),
        ({"shard_groups": [[0], [0, 1]]}, "expected each rank of 0 to 1 in exactly one group"),
        ({"shard_groups": [[0, 1], []]}, "and no empty group"),
        ({"shard_groups": [[0, True]]}, "expected each rank of 0 to 1 in exactly one group"),
        ({"allow_accumulation": 1}, "found allow_accumulation 1, expected True or False"),
    ],
)
def test_options_that_do_not_match_are_refused(options: dict[str, Any], message: str) -> None:
    profiles = [linear(1.0, 8), linear(2.0, 8)]
    for plan in (lambda: plan_fixed_total(profiles, 8, **options), lambda: plan_max_throughput(profiles, **options)):
        with pytest.raises(PlanningError) as caught:
            plan()
        assert message in str(caught.value)


def test_totals_that_groups_cannot_reach_name_the_nearest() -> None:
    profiles = [RankProfile(TimeCurve([1], [1.0]), 1)] * 3
    options = {"allow_accumulation": True, "shard_groups": [[0, 1, 2]]}
    for total, nearest in ((10, 9), (11, 12), (2, 3)):
        with pytest.raises(PlanningError, match=f"the nearest feasible total is {nearest}$"):
            plan_fixed_total(profiles, total, **options)
    assert plan_fixed_total(profiles, 12, **options).micro_batches == [(1, 4)] * 3
    # Of two that are equally near the smaller.
    with pytest.raises(PlanningError, match="the nearest feasible total is 6$"):
        plan_fixed_total(profiles[:2], 7, allow_accumulation=True, shard_groups=[[1, 0]])


def test_throughput_weighs_communication_against_waiting() -> None:
    """The second rank can do one sample in 4 s, or 8 in 20 s; the first as many as time allows."""
    profiles = [linear(1.0, 16), RankProfile(TimeCurve([1, 8], [4.0, 20.0]), 8)]
    free = plan_max_throughput(profiles)
    # Within 4 s 5 samples, 1.25 a second; within 16 s 16 + 6, 1.375 a second, which no other time reaches.
    assert free.samples_per_second == pytest.approx(1.375)
    assert free.batch_sizes == [16, 6]
    slow = plan_max_throughput(profiles, 100.0)
    assert (slow.batch_sizes, slow.step_seconds) == ([16, 8], 120.0)
    more = plan_max_throughput(profiles, 100.0, allow_accumulation=True, max_accumulation_steps=2)
    assert (more.micro_batches, more.step_seconds) == ([(16, 2), (8, 2)], 140.0)
    for result in (free, slow, more):
        verify_certificate(profiles, result.certificate)


def test_throughput_ties_go_to_even_and_small_batches() -> None:
    """Without communication and fixed costs every even split makes two samples a second."""
    profiles = [linear(1.0, 8), linear(1.0, 8)]
    assert plan_max_throughput(profiles).batch_sizes == [1, 1]
    options = {"allow_accumulation": True, "max_accumulation_steps": 4}
    assert plan_max_throughput(profiles, **options).micro_batches == [(1, 1), (1, 1)]
    assert plan_max_throughput(profiles, 1e-9).batch_sizes == [8, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow_accumulation": True}, "without max_accumulation_steps, expected both: with ever more micro-batches"),
        ({"max_accumulation_steps": 2}, "without allow_accumulation"),
        ({"allow_accumulation": True, "max_accumulation_steps": 0}, "expected an integer of at least 1"),
        ({"allow_accumulation": True, "max_accumulation_steps": 2.0}, "expected an integer of at least 1"),
        ({"communication_seconds": -1.0}, "found communication_seconds -1.0, expected finite seconds of at least 0"),
        ({"communication_seconds": float("nan")}, "found communication_seconds nan"),
    ],
)
def test_throughput_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanningError) as caught:
        plan_max_throughput([linear(1.0, 8)], **options)
    assert message in str(caught.value)
    with pytest.raises(PlanningError, match="found no profiles"):
        plan_max_throughput([])


def random_cluster(seed: int, ranks: int) -> list[RankProfile]:
    """Ranks as they are measured: powers of two and the maximum, with noise."""
    rng = np.random.default_rng(seed)
    profiles = []
    for _ in range(ranks):
        largest = int(rng.integers(8, 200))
        sizes = sorted({1 << power for power in range(8) if 1 << power < largest} | {largest})
        start, slope = rng.uniform(0.001, 0.1), rng.uniform(0.0005, 0.02)
        seconds = [(start + slope * size) * rng.uniform(0.9, 1.1) for size in sizes]
        profiles.append(RankProfile(TimeCurve(sizes, seconds), largest, float(rng.uniform(0, 0.01))))
    return profiles


@pytest.mark.parametrize(
    "groups",
    [None, [list(range(4 * node, 4 * node + 4)) for node in range(16)], [list(range(k, 64, 16)) for k in range(16)]],
    ids=["alone", "nodes", "strided"],
)
def test_large_clusters_are_certified(groups: list[list[int]] | None) -> None:
    profiles = random_cluster(3, 64)
    result = plan_fixed_total(profiles, 4096, allow_accumulation=True, shard_groups=groups)
    assert sum(result.batch_sizes) == 4096
    verify_certificate(profiles, result.certificate)
    result = plan_max_throughput(profiles, 0.5, allow_accumulation=True, max_accumulation_steps=4, shard_groups=groups)
    verify_certificate(profiles, result.certificate)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 6), per_rank=st.integers(1, 120))
def test_more_freedom_is_never_slower(seed: int, ranks: int, per_rank: int) -> None:
    profiles = random_cluster(seed, ranks)
    total = ranks * per_rank
    free = plan_fixed_total(profiles, total, allow_accumulation=True)
    verify_certificate(profiles, free.certificate)
    groups = [list(range(ranks))]
    tied = plan_fixed_total(profiles, total, allow_accumulation=True, shard_groups=groups)
    verify_certificate(profiles, tied.certificate)
    assert free.step_seconds <= tied.step_seconds * (1 + 1e-12)
    if total <= sum(profile.largest_micro_batch for profile in profiles):
        once = plan_fixed_total(profiles, total)
        assert tied.step_seconds <= once.step_seconds * (1 + 1e-12)
        # No total is faster a sample than the best one.
        best = plan_max_throughput(profiles, 0.25)
        verify_certificate(profiles, best.certificate)
        assert total / (once.step_seconds + 0.25) <= best.samples_per_second * (1 + 1e-12)
    # What the planner does not depend on: the order of the ranks, and the unit of time.
    turned = plan_fixed_total(profiles[::-1], total, allow_accumulation=True)
    assert turned.step_seconds == free.step_seconds
    doubled = [
        RankProfile(
            TimeCurve(profile.time.batch_sizes, [2 * value for value in profile.time.seconds]),
            profile.max_micro_batch_size,
            2 * profile.accumulation_overhead_seconds,
        )
        for profile in profiles
    ]
    scaled = plan_fixed_total(doubled, total, allow_accumulation=True)
    assert scaled.step_seconds == 2 * free.step_seconds and scaled.micro_batches == free.micro_batches
