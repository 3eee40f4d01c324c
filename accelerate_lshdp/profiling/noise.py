# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A rank's times without what chance makes of them.

There is time for a few measurements of each size only, and on a busy machine even their medians are off by some
percent, one up, the next one down: a plan gives more samples than it should to whoever seems to be fast at its size.
But times of neighbouring sizes know of each other. So every median is moved towards a line through all of them, by
the part of its distance that the noise of the measurements explains. Where the noise is small, or the curve far from
a line (steps, plateaus), nothing is moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from accelerate_lshdp.profiling.line_fit import fit_line
from accelerate_lshdp.profiling.repeats import Repeats


# The standard error of a median, from the median absolute deviation: normal noise has 1.48 of those for its standard
# deviation, and a median varies 1.25 times as much as a mean.
_ERROR_OF_MEDIAN = 1.25 * 1.48
# A line takes two; what is left has to show how far from a line the curve is.
_LEAST_SIZES = 4


def seconds_without_noise(repeats: Mapping[int, Repeats]) -> dict[int, float]:
    """Seconds of a micro-batch of each size (empirical Bayes: Efron and Morris, 1973).

    With relative distances r from the line that vary by V, and medians that chance moves by s, a distance is real by
    the part 1 - s^2 / V, at least 0. Of fewer than four sizes the medians are returned as they are.

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
    noise = median(
        _ERROR_OF_MEDIAN * measured.spread / math.sqrt(len(measured.seconds)) for measured in repeats.values()
    )
    if noise**2 >= variance:
        return line
    real = 1 - noise**2 / variance
    return {size: line[size] * (1 + real * distances[size]) for size in medians}
