# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A rank's step time in exact integer arithmetic, for the verification of certificates.

Measured seconds are floats, hence fractions with a power of two below. In units of one common fraction of a second all
of them, and all values interpolated between them, are integers: Python adds and compares these without rounding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from accelerate_lshdp.documents.curves import RankProfile


class ExactRank:
    """The step times of one rank as integers, in units of 1 / `units_per_second` seconds.

    Args:
        profile: the rank's curves and limits.
        bucket_seconds: seconds of each bucket on the network; None: nothing overlaps.

    Raises:
        ValueError: buckets and profile do not match, or no micro-batch fits the memory.
    """

    def __init__(self, profile: RankProfile, bucket_seconds: Sequence[float] | None) -> None:
        curves = [profile.time]
        if bucket_seconds is not None:
            ready = profile.bucket_ready or ()
            if len(ready) != len(bucket_seconds):
                raise ValueError(f"found {len(ready)} bucket_ready curves for {len(bucket_seconds)} bucket_seconds")
            curves += ready
        scalars = [profile.fixed_seconds, profile.accumulation_overhead_seconds, profile.communication_load_seconds]
        scalars += bucket_seconds or ()
        numbers = scalars + [value for curve in curves for value in curve.seconds]
        gaps = [after - before for curve in curves for before, after in pairwise(curve.batch_sizes)]
        # Floats are fractions whose denominators are powers of two; interpolation divides by the gaps between sizes.
        # With both in the unit, every value is an integer. Python's integers have any length.
        self.units_per_second = math.lcm(*(value.as_integer_ratio()[1] for value in numbers)) * math.lcm(*gaps)
        self._fixed, self._overhead, self._load, *bucket_units = map(self._units, scalars)
        self._time, *self._ready = (
            _ExactCurve(curve.batch_sizes, list(map(self._units, curve.seconds))) for curve in curves
        )
        self._remaining = [sum(bucket_units[place:]) for place in range(len(bucket_units))]
        self._known: dict[int, tuple[int, int]] = {}
        self.largest = _largest_micro_batch(profile)

    def finish(self, size: int, steps: int) -> int:
        """The time, in units, at which the rank has finished `steps` micro-batches of `size` samples."""
        if size not in self._known:
            time = self._time(size)
            ends = (ready(size) + remaining for ready, remaining in zip(self._ready, self._remaining, strict=True))
            self._known[size] = self._fixed + max([time + self._load, *ends]), time + self._overhead
        first, more = self._known[size]
        return first + (steps - 1) * more

    def units_before(self, seconds: Fraction) -> int:
        """`seconds` in units, rounded up: a time in units is below `seconds` exactly if it is below this number."""
        return -(-seconds.numerator * self.units_per_second // seconds.denominator)

    def largest_below(self, units: int, steps: int, least: int, most: int) -> int:
        """The largest micro-batch, from `least` to `most` samples, of which `steps` take less than `units`.

        `least` is a size that is known to do so, or 0.
        """
        if least == most or self.finish(least + 1, steps) >= units:
            return least
        below, beyond = least + 1, most + 1
        while beyond - below > 1:
            middle = (below + beyond) // 2
            if self.finish(middle, steps) < units:
                below = middle
            else:
                beyond = middle
        return below

    def _units(self, seconds: float) -> int:
        numerator, denominator = seconds.as_integer_ratio()
        return numerator * (self.units_per_second // denominator)


class _ExactCurve:
    """The running maximum of the linear interpolation; values are multiples of the gaps between the sizes."""

    def __init__(self, sizes: Sequence[int], values: Sequence[int]) -> None:
        self._sizes, self._values = sizes, values
        self._reached = [max(values[: place + 1]) for place in range(len(values))]

    def __call__(self, size: int) -> int:
        place = bisect_right(self._sizes, size) - 1
        if place < 0:
            return self._values[0]
        if self._sizes[place] == size:
            return self._reached[place]
        rise = self._values[place + 1] - self._values[place]
        part = rise * (size - self._sizes[place]) // (self._sizes[place + 1] - self._sizes[place])
        return max(self._reached[place], self._values[place] + part)


def _largest_micro_batch(profile: RankProfile) -> int:
    """The largest micro-batch, in samples, within the rank's limits; in integers, as the step times.

    Raises:
        ValueError: no sample fits the memory.
    """
    if profile.memory_limit_bytes is None:
        return profile.max_micro_batch_size
    sizes = profile.memory.batch_sizes
    scale = math.lcm(*(after - before for before, after in pairwise(sizes)))
    curve = _ExactCurve(sizes, [value * scale for value in profile.memory.bytes])
    largest = 0
    for size in range(1, min(sizes[-1], profile.max_micro_batch_size) + 1):
        if curve(size) > profile.memory_limit_bytes * scale:
            break
        largest = size
    if largest == 0:
        raise ValueError(f"found a memory limit of {profile.memory_limit_bytes} bytes, into which no sample fits")
    return largest
