# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What chance makes of measured times, and times without it.

There is time for a few measurements of each size only, and on a busy machine even their medians are off by some
percent, one up, the next one down: a plan gives more samples than it should to whoever seems to be fast at its size.
But times of neighbouring sizes know of each other. So every median is moved towards a line through all of them, by
the part of its distance that the noise of the measurements explains. Where the noise is small, or the curve far from
a line (steps, plateaus), nothing is moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from accelerate_lshdp.profiling.line_fit import fit_line
from accelerate_lshdp.profiling.repeats import Repeats


# The standard error of a median, from the median absolute deviation: normal noise has 1.48 of those for its standard
# deviation, and a median varies 1.25 times as much as a mean.
_ERROR_OF_MEDIAN = 1.25 * 1.48
# What is less of the times that it is a difference of is not worth a thought.
_NEGLIGIBLE = 0.01
# The deviation of a few measurements says little: that of a size counts if it is so much less than usual.
_MUCH_QUIETER = 3.0
# A line takes two; what is left has to show how far from a line the curve is.
_LEAST_SIZES = 4


def seconds_without_noise(repeats: Mapping[int, Repeats]) -> dict[int, float]:
    """Seconds of a micro-batch of each size (empirical Bayes: Efron and Morris, 1973).

    With relative distances r from the line that vary by V, and medians that chance moves by s, a distance is real by
    the part 1 - s^2 / V, at least 0. Of fewer than four sizes the medians are returned as they are, and so they are
    where there was time for one measurement of most sizes, whose noise nobody knows.

    Args:
        repeats: what was measured of each size.
    """
    medians = {size: measured.median for size, measured in repeats.items()}
    if len(medians) < _LEAST_SIZES:
        return medians
    base, slope = fit_line(medians.items())
    line = {size: base + slope * size for size in medians}
    distances = {size: seconds / line[size] - 1 for size, seconds in medians.items()}
    variance = sum(distance**2 for distance in distances.values()) / (len(medians) - 2)
    errors = {size: _error(measured.seconds) / medians[size] for size, measured in repeats.items()}
    usual = median(errors.values())
    moved = {}
    for size, distance in distances.items():
        noise = min(usual, _MUCH_QUIETER * errors[size])
        real = max(0.0, 1 - noise**2 / variance) if variance > 0 else 1.0
        moved[size] = line[size] * (1 + real * distance)
    return moved


def significant_median(differences: Sequence[float], scale: float) -> float:
    """The median; 0 if chance explains it, or if it is little on that scale."""
    middle = median(differences)
    return middle if abs(middle) > max(_error(differences), _NEGLIGIBLE * scale) else 0.0


def _error(values: Sequence[float]) -> float:
    """The standard error of their median."""
    middle = median(values)
    return _ERROR_OF_MEDIAN * median(abs(value - middle) for value in values) / math.sqrt(len(values))
