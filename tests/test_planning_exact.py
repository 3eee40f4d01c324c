# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Both planners equal brute force, with the tie rules, on thousands of random small problems with all options."""

from __future__ import annotations

import random

import pytest
from planning_oracle import best_fixed_total, best_throughput, random_instance

from accelerate_lshdp.planning import PlanningError, plan_fixed_total, plan_max_throughput, verify_certificate


@pytest.mark.parametrize(
    # cases, ranks, largest size, largest total
    ("cases", "ranks", "largest", "greatest"),
    [(1000, 2, 9, 24), (900, 3, 6, 14), (400, 4, 4, 11)],
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
    ("cases", "ranks", "largest", "most_steps"), [(1000, 2, 9, 5), (900, 3, 5, 3), (400, 4, 4, 2)]
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
