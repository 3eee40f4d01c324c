# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Noise is taken out of measured times, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest

from accelerate_lshdp.profiling.line_fit import fit_line
from accelerate_lshdp.profiling.noise import seconds_without_noise
from accelerate_lshdp.profiling.repeats import Repeats


SIZES = (1, 2, 4, 8, 16, 25)


def measured(
    curve: Callable[[int], float], noise: float, generator: random.Random, count: int = 4
) -> dict[int, Repeats]:
    return {
        size: Repeats([curve(size) * generator.lognormvariate(0.0, noise) for _ in range(count)]) for size in SIZES
    }


def error(seconds: dict[int, float], curve: Callable[[int], float]) -> float:
    """Mean square of the relative errors."""
    return mean((value / curve(size) - 1) ** 2 for size, value in seconds.items())


def line(size: int) -> float:
    return 0.05 + 0.1 * size


def steps(size: int) -> float:
    """As on a device that computes eight samples at a time."""
    return 0.1 + 0.2 * -(-size // 8)


@pytest.mark.parametrize("noise", [0.02, 0.08])
def test_times_on_a_line_are_known_better_than_their_medians(noise: float) -> None:
    generator = random.Random(0)
    before, after = [], []
    for _ in range(300):
        repeats = measured(line, noise, generator)
        before.append(error({size: each.median for size, each in repeats.items()}, line))
        after.append(error(seconds_without_noise(repeats), line))
    assert mean(after) < 0.6 * mean(before)


@pytest.mark.parametrize(("noise", "most"), [(0.0, 0.0), (0.002, 1.05), (0.02, 1.2)])
def test_steps_stay_where_they_are(noise: float, most: float) -> None:
    generator = random.Random(0)
    before, after = [], []
    for _ in range(300):
        repeats = measured(steps, noise, generator)
        before.append(error({size: each.median for size, each in repeats.items()}, steps))
        after.append(error(seconds_without_noise(repeats), steps))
    assert mean(after) <= most * mean(before) + 1e-24


def test_few_sizes_keep_their_medians() -> None:
    repeats = {size: Repeats([float(size), 2.0 * size, 9.0 * size]) for size in (1, 2, 4)}
    assert seconds_without_noise(repeats) == {1: 2.0, 2: 4.0, 4: 8.0}


def test_a_line_has_no_negative_part() -> None:
    assert fit_line([(1, 0.3), (3, 0.7)]) == pytest.approx((0.1, 0.2))
    assert fit_line([(1, 1.0), (2, 3.0)])[0] == 0.0
    assert fit_line([(1, 3.0), (2, 1.0)])[1] == 0.0
    assert fit_line([(4, 2.0)]) == pytest.approx((2.0, 0.0))
    with pytest.raises(ValueError, match="found no measured points, expected at least one"):
        fit_line([])
