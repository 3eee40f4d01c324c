# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The planner is exact for the curves it is given, and its certificate proves it to code that does not trust it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from accelerate_lshdp.plan import Plan
from accelerate_lshdp.planning import (
    CertificateError,
    PlanningError,
    RankProfile,
    TimeCurve,
    plan_fixed_total,
    verify_certificate,
)


def linear(seconds_per_sample: float, largest: int) -> RankProfile:
    return RankProfile(TimeCurve([1, largest], [seconds_per_sample, seconds_per_sample * largest]), largest)


def random_profile(rng: random.Random) -> RankProfile:
    """A small curve on a coarse grid of times, so that plateaus, dips and ties between ranks are common."""
    sizes = sorted(rng.sample(range(1, 10), rng.randint(1, 5)))
    seconds = [rng.randint(1, 6) / 2 for _ in sizes]
    if rng.random() < 0.6:
        seconds.sort()
    return RankProfile(TimeCurve(sizes, seconds), rng.randint(1, sizes[-1]))


def oracle_seconds(curve: TimeCurve, batch_size: int) -> Fraction:
    """The definition, read literally: the largest interpolated value at any size up to `batch_size`."""

    def interpolated(size: int) -> Fraction:
        points = list(zip(curve.batch_sizes, map(Fraction, curve.seconds), strict=True))
        if size <= points[0][0]:
            return points[0][1]
        (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if pair[0][0] < size <= pair[1][0])
        return y0 + (y1 - y0) * Fraction(size - x0, x1 - x0)

    return max(interpolated(size) for size in range(1, batch_size + 1))


def oracle(profiles: list[RankProfile], total: int) -> tuple[Fraction, list[int]]:
    """The best cut by trying all of them in exact arithmetic, ties broken as the design says."""
    cuts = itertools.product(*(range(1, profile.max_micro_batch_size + 1) for profile in profiles))
    tables = [
        [oracle_seconds(profile.time, size) for size in range(1, profile.max_micro_batch_size + 1)]
        for profile in profiles
    ]
    keys = []
    for cut in cuts:
        if sum(cut) == total:
            step = max(table[size - 1] for table, size in zip(tables, cut, strict=True))
            keys.append((step, max(cut) - min(cut), cut))
    step, _, cut = min(keys)
    return step, list(cut)


def test_solver_matches_brute_force_with_ties_on_thousands_of_instances() -> None:
    rng = random.Random(20260)
    for case in range(2400):
        ranks = rng.choice([2, 2, 2, 3, 3, 4]) if case % 8 else 4
        profiles = [random_profile(rng) for _ in range(ranks)]
        total = rng.randint(ranks, sum(profile.max_micro_batch_size for profile in profiles))
        result = plan_fixed_total(profiles, total)
        step, cut = oracle(profiles, total)
        assert result.step_seconds == pytest.approx(float(step), rel=1e-13), (profiles, total)
        assert result.batch_sizes == cut, (profiles, total)
        assert max(result.rank_seconds) == result.step_seconds
        verify_certificate(profiles, result.certificate)


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


# Each makes one claim of a valid certificate false, and says which complaint must follow.
TAMPERED = {
    "another cut of the same total": (lambda c: c.update(batch_sizes=[7, 5]), "slowest rank takes 10.0 s"),
    "a cut of another total": (lambda c: c.update(batch_sizes=[8, 3]), "sum to 11"),
    "beyond the memory limit": (lambda c: c.update(batch_sizes=[17, -5]), "rank 0 has batch size 17"),
    "an empty rank": (lambda c: c.update(batch_sizes=[12, 0]), "rank 1 has batch size 0"),
    "a better time than is real": (lambda c: c.update(step_seconds=7.0), "claimed step_seconds 7.0"),
    "a worse time than is real": (lambda c: c.update(step_seconds=9.0), "claimed step_seconds 9.0"),
    "a bound that is too low": (lambda c: c.update(largest_batches_below=[6, 3]), "rank 0 finishes 7 samples"),
    "a blocked rank that is not": (lambda c: c.update(largest_batches_below=[0, 3]), "rank 0 finishes 1 samples"),
    "a bound that proves nothing": (lambda c: c.update(largest_batches_below=[8, 4]), "a faster cut is not excluded"),
    "a bound beyond the limit": (lambda c: c.update(largest_batches_below=[17, 3]), "expected 0 to its maximum 16"),
    "a negative bound": (lambda c: c.update(largest_batches_below=[7, -1]), "expected 0 to its maximum 16"),
    "a slower cut with its own time": (
        lambda c: c.update(batch_sizes=[7, 5], step_seconds=10.0, largest_batches_below=[9, 4]),
        "a faster cut is not excluded",
    ),
    "a missing key": (lambda c: c.pop("step_seconds"), "expected an object with the keys"),
    "an unknown key": (lambda c: c.update(note=1), "expected an object with the keys"),
    "too few ranks": (lambda c: c.update(batch_sizes=[12]), "expected a list of 2 integers"),
    "a fraction of a sample": (lambda c: c.update(batch_sizes=[8.0, 4]), "expected a list of 2 integers"),
    "not a list": (lambda c: c.update(largest_batches_below="73"), "expected a list of 2 integers"),
    "a boolean total": (lambda c: c.update(total_batch_size=True), "expected an integer"),
    "an infinite time": (lambda c: c.update(step_seconds=math.inf), "expected a positive and finite number"),
    "no time": (lambda c: c.update(step_seconds=math.nan), "expected a positive and finite number"),
    "a boolean time": (lambda c: c.update(step_seconds=True), "expected a positive and finite number"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_certificate_is_rejected(case: str) -> None:
    profiles = [linear(1.0, 16), linear(2.0, 16)]
    certificate = plan_fixed_total(profiles, 12).certificate
    verify_certificate(profiles, certificate)
    tampered = copy.deepcopy(certificate)
    change, message = TAMPERED[case]
    change(tampered)
    with pytest.raises(CertificateError) as caught:
        verify_certificate(profiles, tampered)
    assert message in str(caught.value)


def test_no_certificate_exists_for_a_cut_that_is_not_optimal() -> None:
    profiles = [
        RankProfile(TimeCurve([1, 3, 5, 7], [1.0, 3.0, 2.0, 4.0]), 7),
        RankProfile(TimeCurve([2, 4, 6], [2.0, 2.0, 6.0]), 6),
    ]
    maxima = [profile.max_micro_batch_size for profile in profiles]
    total = 8
    best = plan_fixed_total(profiles, total).step_seconds
    refused = 0
    for sizes in itertools.product(*(range(1, largest + 1) for largest in maxima)):
        step = max(profile.time(size) for profile, size in zip(profiles, sizes, strict=True))
        if sum(sizes) != total or step <= best:
            continue
        for below in itertools.product(*(range(largest + 1) for largest in maxima)):
            claim = {"total_batch_size": total, "batch_sizes": list(sizes), "step_seconds": step}
            with pytest.raises(CertificateError):
                verify_certificate(profiles, {**claim, "largest_batches_below": list(below)})
            refused += 1
    assert refused >= 2 * 8 * 7  # at least two cuts with every possible bound


def test_certificate_does_not_hold_for_other_curves() -> None:
    certificate = plan_fixed_total([linear(1.0, 16), linear(2.0, 16)], 12).certificate
    with pytest.raises(CertificateError, match="slowest rank takes"):
        verify_certificate([linear(1.0, 16), linear(3.0, 16)], certificate)
    with pytest.raises(CertificateError, match="finishes 8 samples in less"):
        verify_certificate([linear(0.5, 16), linear(2.0, 16)], certificate)


def test_verification_uses_nothing_of_the_solver() -> None:
    import accelerate_lshdp.planning.certificate as module

    with open(module.__file__, encoding="utf-8") as file:
        source = file.read()
    assert "batch_sizes import" not in source and "numpy" not in source
    assert ".table(" not in source and ".time(" not in source


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
            "the sum of the ranks' max_micro_batch_size [16, 8]: the nearest feasible total is 24",
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
        expected = [float(oracle_seconds(curve, size)) for size in range(1, sizes[-1] + 1)]
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
        "import json, sys, accelerate_lshdp, accelerate_lshdp.plan, accelerate_lshdp.planning;"
        "accelerate_lshdp.Plan.from_batch_sizes([2, 1]).to_json();"
        "print(json.dumps([name for name in ('torch', 'accelerate', 'transformers') if name in sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert json.loads(output) == []
