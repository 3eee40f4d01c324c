# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Both planners equal brute force, with the tie rules, on thousands of random small problems with all options."""

from __future__ import annotations

import random

import pytest
from planning_oracle import best_fixed_total, best_throughput, random_instance

from accelerate_lshdp.planning import (
    CertificateError,
    PlanningError,
    RankProfile,
    TimeCurve,
    plan_fixed_total,
    plan_max_throughput,
    verify_certificate,
)


@pytest.mark.parametrize(
    # cases, ranks, largest size, largest total
    ("cases", "ranks", "largest", "greatest"),
    [
        (100, 2, 9, 24),
        (90, 3, 6, 14),
        (40, 4, 4, 11),
        pytest.param(1000, 2, 9, 24, marks=pytest.mark.slow),
        pytest.param(900, 3, 6, 14, marks=pytest.mark.slow),
        pytest.param(400, 4, 4, 11, marks=pytest.mark.slow),
    ],
)
def test_fixed_total_equals_brute_force(cases: int, ranks: int, largest: int, greatest: int) -> None:
    rng = random.Random(20260 + ranks)
    planned = 0
    while planned < cases:
        instance = random_instance(rng, ranks, largest)
        total = rng.randint(ranks, greatest)
        case = (instance, total)
        expected = best_fixed_total(instance, total)
        if expected is None:
            with pytest.raises(PlanningError, match="the nearest feasible total is"):
                plan_fixed_total(instance.profiles, total, **instance.options)
            continue
        step, micro_batches = expected
        result = plan_fixed_total(instance.profiles, total, **instance.options)
        assert result.step_seconds == pytest.approx(float(step), rel=1e-13), case
        assert result.micro_batches == micro_batches, case
        assert result.batch_sizes == [size * steps for size, steps in micro_batches]
        verify_certificate(instance.profiles, result.certificate)
        planned += 1


@pytest.mark.parametrize(
    ("cases", "ranks", "largest", "most_steps"),
    [
        (200, 2, 9, 5),
        (200, 3, 5, 3),
        (100, 4, 4, 2),
        pytest.param(1000, 2, 9, 5, marks=pytest.mark.slow),
        pytest.param(900, 3, 5, 3, marks=pytest.mark.slow),
        pytest.param(400, 4, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_max_throughput_equals_brute_force(cases: int, ranks: int, largest: int, most_steps: int) -> None:
    rng = random.Random(20270 + ranks)
    for _ in range(cases):
        instance = random_instance(rng, ranks, largest)
        most = rng.randint(1, most_steps) if instance.options["allow_accumulation"] else None
        communication = rng.choice([0.0, 0.25, 1.0, 5.0])
        case = (instance, most, communication)
        rate, micro_batches = best_throughput(instance, communication, most or 1)
        result = plan_max_throughput(instance.profiles, communication, max_accumulation_steps=most, **instance.options)
        assert result.samples_per_second == pytest.approx(float(rate), rel=1e-12), case
        assert result.micro_batches == micro_batches, case
        verify_certificate(instance.profiles, result.certificate)


def test_max_throughput_of_multiples_equals_brute_force() -> None:
    rng = random.Random(20275)
    smaller = 0
    for _ in range(250):
        ranks = rng.choice([2, 3, 4])
        instance = random_instance(rng, ranks, 10 - 2 * ranks)
        instance.options["allow_accumulation"] = False
        multiple, communication = rng.choice([2, ranks]), rng.choice([0.0, 0.25, 1.0, 5.0])
        case = (instance, multiple, communication)
        if sum(profile.largest_micro_batch for profile in instance.profiles) // multiple * multiple < ranks:
            continue
        rate, micro_batches = best_throughput(instance, communication, 1, multiple)
        result = plan_max_throughput(instance.profiles, communication, multiple_of=multiple, **instance.options)
        assert result.samples_per_second == pytest.approx(float(rate), rel=1e-12), case
        assert result.micro_batches == micro_batches, case
        verify_certificate(instance.profiles, result.certificate)
        free = plan_max_throughput(instance.profiles, communication, **instance.options)
        if free.samples_per_second > result.samples_per_second * (1 + 1e-9):
            smaller += 1
            pretended = {key: value for key, value in result.certificate.items() if key != "multiple_of"}
            with pytest.raises(CertificateError, match="are not excluded|the bound does not hold"):
                verify_certificate(instance.profiles, pretended)
    assert smaller > 40


def test_what_is_no_multiple_is_refused() -> None:
    rank = RankProfile(TimeCurve([1, 2, 3], [1.0, 2.0, 3.0]), 3)
    result = plan_max_throughput([rank, rank], 1.0, multiple_of=2)
    assert result.batch_sizes == [3, 3]
    for total, micro_batches in ((5, [[3, 1], [2, 1]]), (3, [[2, 1], [1, 1]])):
        changed = {**result.certificate, "total_batch_size": total, "micro_batches": micro_batches}
        with pytest.raises(CertificateError, match="expected a multiple of 2|step_seconds"):
            verify_certificate([rank, rank], {**changed, "step_seconds": max(m for m, _ in micro_batches) + 1.0})
    for multiple in (0, -2, 2.0, True, "2"):
        with pytest.raises(CertificateError, match="multiple_of"):
            verify_certificate([rank, rank], {**result.certificate, "multiple_of": multiple})
        with pytest.raises(PlanningError, match="multiple_of"):
            plan_max_throughput([rank, rank], multiple_of=multiple)
    with pytest.raises(PlanningError, match="room for a multiple of 7"):
        plan_max_throughput([rank, rank], multiple_of=7)
    with pytest.raises(PlanningError, match="one or the other"):
        plan_max_throughput([rank, rank], multiple_of=2, allow_accumulation=True, max_accumulation_steps=2)


def test_infeasible_totals_name_the_nearest_one_that_brute_force_finds() -> None:
    rng = random.Random(20280)
    seen = {"accumulation": 0, "without": 0}
    while min(seen.values()) < 40:
        instance = random_instance(rng, 3, 3)
        if instance.options["allow_accumulation"]:
            instance.options["shard_groups"] = rng.choice([[[0, 1, 2]], None, [[0, 2], [1]]])
        total = rng.randint(1, 16)
        if best_fixed_total(instance, total) is not None:
            continue
        nearest = next(
            candidate
            for distance in range(1, 20)
            for candidate in (total - distance, total + distance)
            if candidate > 0 and best_fixed_total(instance, candidate) is not None
        )
        with pytest.raises(PlanningError) as caught:
            plan_fixed_total(instance.profiles, total, **instance.options)
        assert str(caught.value).endswith(f"the nearest feasible total is {nearest}"), (instance, total)
        seen["accumulation" if instance.options["allow_accumulation"] else "without"] += 1
