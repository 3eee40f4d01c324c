# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Smoothing of measured times by size, and a significance test of differences.

There is time for a few measurements of each size only, and on a busy machine even their medians are off by some
percent: a plan then gives too many samples to a rank that seems fast at its size by chance. Times of neighbouring
    sizes
are close to a line, so every median is moved towards a line through all of them, by the part of its distance that the
noise of the measurements explains. Where the noise is small, or the curve far from a line (steps, plateaus), nothing
is moved.
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
# A difference below this fraction of the times that it is a difference of counts as none.
_NEGLIGIBLE = 0.01
# The deviation of a few measurements is itself noisy: that of a size replaces the usual one only if it is smaller by
# this factor.
_MUCH_QUIETER = 3.0
# Two degrees of freedom go into the line; the others have to show how far from a line the curve is.
_LEAST_SIZES = 4


def seconds_without_noise(repeats: Mapping[int, Repeats]) -> dict[int, float]:
    """Seconds of a micro-batch of each size (empirical Bayes: Efron and Morris, 1973).

    With relative distances r from the line that vary by V, and medians that chance moves by s, a distance is real by
    the part 1 - s^2 / V, at least 0. Of fewer than four sizes the medians are returned as they are, and so they are
    where most sizes were measured once only, so that their noise is unknown.

    Args:
        repeats: the measurements of each size.
    """
    medians = {size: measured.median for size, measured in repeats.items()}
    if len(medians) < _LEAST_SIZES:
        return medians
    # Relative distances, as the noise of a time is in proportion to it.
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
    """The median of `differences` in seconds; 0 if chance explains it, or if it is below 1 % of `scale`."""
    middle = median(differences)
    return middle if abs(middle) > max(_error(differences), _NEGLIGIBLE * scale) else 0.0


def _error(values: Sequence[float]) -> float:
    """The standard error of the median of `values`, from their median absolute deviation."""
    middle = median(values)
    return _ERROR_OF_MEDIAN * median(abs(value - middle) for value in values) / math.sqrt(len(values))
