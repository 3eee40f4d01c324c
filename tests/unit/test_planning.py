# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The planner is exact for the curves it is given, and its certificate proves it to code that does not trust it."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from planning_oracle import running_maximum

from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.planning import (
    PlanningError,
    RankProfile,
    TimeCurve,
    plan_fixed_total,
    verify_certificate,
)


def linear(seconds_per_sample: float, largest: int) -> RankProfile:
    return RankProfile(TimeCurve([1, largest], [seconds_per_sample, seconds_per_sample * largest]), largest)


def test_known_answers() -> None:
    assert plan_fixed_total([linear(1.0, 16), linear(2.0, 16)], 12).batch_sizes == [8, 4]
    assert plan_fixed_total([linear(1.0, 4), linear(2.0, 16)], 12).batch_sizes == [4, 8]
    # A plateau: the slow rank takes 1 to 8 samples in the same time. The most even cut wins, then the first one.
    flat = RankProfile(TimeCurve([1, 8], [8.0, 8.0]), 8)
    assert plan_fixed_total([linear(1.0, 8), flat], 9).batch_sizes == [4, 5]
    # One sample on the slowest rank already takes longer than everything else together.
    slow = linear(100.0, 8)
    result = plan_fixed_total([linear(1.0, 8), slow], 9)
    assert (result.batch_sizes, result.step_seconds) == ([8, 1], 100.0)
    assert result.micro_batches == [(8, 1), (1, 1)]
    assert result.rank_seconds == [8.0, 100.0]


def test_result_goes_into_a_plan_and_its_certificate_survives_the_file() -> None:
    profiles = [linear(1.0, 16), linear(2.0, 16)]
    result = plan_fixed_total(profiles, np.int64(12))
    plan = Plan.from_batch_sizes(result.micro_batches, certificate=result.certificate)
    verify_certificate(profiles, Plan.from_json(plan.to_json()).certificate)
    assert plan.batch_sizes == [8, 4]


def test_many_ranks_and_large_batches_are_quick_and_certified() -> None:
    rng = np.random.default_rng(0)
    profiles = [RankProfile(TimeCurve([1, 64, 1024], np.sort(rng.random(3)) + 0.1), 1024) for _ in range(300)]
    result = plan_fixed_total(profiles, 100_000)
    assert sum(result.batch_sizes) == 100_000
    verify_certificate(profiles, result.certificate)


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (
            1,
            "found total_batch_size 1, expected at least 2, one sample for each rank: the nearest feasible total is 2",
        ),
        (0, "the nearest feasible total is 2"),
        (-4, "the nearest feasible total is 2"),
        (
            25,
            "the sum of the ranks' largest micro-batches [16, 8]: the nearest feasible total is 24",
        ),
        (2**40, "the nearest feasible total is 24"),
        (12.0, "expected an integer number of samples"),
        (True, "expected an integer number of samples"),
        ("12", "expected an integer number of samples"),
    ],
)
def test_infeasible_total_names_the_limit_and_the_nearest_feasible_one(total: object, message: str) -> None:
    with pytest.raises(PlanningError) as caught:
        plan_fixed_total([linear(1.0, 16), linear(2.0, 8)], total)
    assert message in str(caught.value)


def test_both_limits_are_feasible_themselves() -> None:
    profiles = [linear(1.0, 16), linear(2.0, 8)]
    assert plan_fixed_total(profiles, 2).batch_sizes == [1, 1]
    assert plan_fixed_total(profiles, 24).batch_sizes == [16, 8]
    with pytest.raises(PlanningError, match="expected one for each rank"):
        plan_fixed_total([], 4)


def test_curve_is_the_running_maximum_of_the_interpolation() -> None:
    curve = TimeCurve([2, 4, 6, 10], [4.0, 8.0, 2.0, 10.0])
    assert [curve(size) for size in range(1, 11)] == [4.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 10.0]
    assert curve.table(10).tolist() == [curve(size) for size in range(1, 11)]


def test_curve_never_decreases_and_meets_its_definition() -> None:
    rng = random.Random(5)
    for _ in range(100):
        sizes = sorted(rng.sample(range(1, 40), rng.randint(1, 8)))
        curve = TimeCurve(sizes, [rng.uniform(1e-4, 1e2) for _ in sizes])
        table = curve.table(sizes[-1])
        assert (np.diff(table) >= 0).all()
        expected = [float(running_maximum(sizes, curve.seconds, size)) for size in range(1, sizes[-1] + 1)]
        np.testing.assert_allclose(table, expected, rtol=1e-13)


def test_curve_is_not_extrapolated() -> None:
    curve = TimeCurve([1, 8], [1.0, 8.0])
    for outside in (0, 9, -1):
        with pytest.raises(ValueError, match="the curve is not extrapolated"):
            curve(outside)
        with pytest.raises(ValueError, match="the curve is not extrapolated"):
            curve.table(outside)
    for limit in (0, 9):
        with pytest.raises(ValueError, match="measure up to the limit"):
            RankProfile(curve, limit)
    with pytest.raises(ValueError, match="found 4.0 in max_micro_batch_size"):
        RankProfile(curve, 4.0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], "found 0 batch sizes and 0 times"),
        ([1, 2], [1.0], "found 2 batch sizes and 1 times"),
        ([2, 1], [1.0, 2.0], "expected strictly increasing ones"),
        ([1, 1], [1.0, 2.0], "expected strictly increasing ones"),
        ([0, 1], [1.0, 2.0], "expected strictly increasing ones of at least 1"),
        ([1, 2], [0.0, 2.0], "expected positive and finite seconds"),
        ([1, 2], [1.0, math.inf], "expected positive and finite seconds"),
        ([1, 2], [math.nan, 2.0], "expected positive and finite seconds"),
        ([1.5, 2], [1.0, 2.0], "found 1.5 in batch_sizes, expected an integer"),
        ([True, 2], [1.0, 2.0], "found True in batch_sizes, expected an integer"),
    ],
)
def test_bad_curves_are_rejected(sizes: list, seconds: list, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TimeCurve(sizes, seconds)
    assert message in str(caught.value)


def test_planning_and_plans_need_no_torch() -> None:
    code = (
        "import json, sys, accelerate_lshdp, accelerate_lshdp.documents.plan, accelerate_lshdp.planning;"
        "accelerate_lshdp.Plan.from_batch_sizes([2, 1]).to_json();"
        "print(json.dumps([name for name in ('torch', 'accelerate', 'transformers') if name in sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert json.loads(output) == []
