# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`LearnedCurve`: a rank's seconds by micro-batch size, learned from its training steps.

Every step adds one time, at the size that the rank trained with. A size's time is the median of its last steps, so a
single slow step counts for nothing. Through the sizes seen goes a straight line, `offset + slope * size`, of which
neither part is negative (or, where the run has a measured profile, that curve times a factor). Close to a size that
was seen, the line gives way to what was seen. After one size alone, time is proportional to the size.

A rank that becomes slower becomes so at all sizes, near enough. When the times at an unchanged size move, those at the
other sizes are multiplied by the same factor: the level is new, the shape stays.

All machines must compute the same curve from the same numbers, to the last bit. So there is only basic arithmetic and
comparison here, in a fixed order: no logarithms, matrix products or library sums, which are not the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low
from typing import Any

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile


#: Number of steps from which a size is judged: two outliers among four do not reach their lower median.
STEPS_TO_JUDGE = 4
# A change of speed is at least so large, and at least so many times the spread of single steps.
_CHANGE = 0.15
_CHANGE_SPREADS = 2.5
# Changes too slow to be seen from one step to the next: so large, between medians of so many steps.
_DRIFT = 0.07
_DRIFT_STEPS = 10
# Steps kept of a size, and sizes kept.
_KEPT_STEPS = 32
_KEPT_SIZES = 8
# The time at another size is between unchanged and proportional, give or take this factor (kernels have plateaus).
_PLAUSIBLE = 1.5
# What the line is fitted with: the relative spread of a step, the relative spread of a median that no number of steps
# takes away, and the share of the offset in the time at the largest size: the likely one, and what it leaves at least.
_STEP_SPREAD = 0.05
_MEDIAN_SPREAD = 0.01
_OFFSET_SHARE = 0.5
_SLOPE_SHARE = 0.2
# How far around a size that was seen the line gives way, relative to the size; and after how many steps by half.
_REACH = 0.1
_DOUBT = 1.0

_Points = list[tuple[int, float, int]]


class LearnedCurve:
    """The present seconds of forward and backward of one rank by micro-batch size.

    Args:
        profile: the rank's measured curve, whose shape is used; None: a straight line.

    Attributes:
        largest: the largest size that the rank has trained with; 0 before the first step.
    """

    def __init__(self, profile: RankProfile | None = None) -> None:
        curve = None if profile is None else profile.time
        self._profiled = None if curve is None else curve.table(curve.batch_sizes[-1])
        self.largest = 0
        self._size = 0
        # Steps at the present size, the newest last; those of earlier stays at it come first.
        self._present: list[float] = []
        # Steps at other sizes; the size that was left last comes last.
        self._others: dict[int, list[float]] = {}
        # Steps since the last change of size or speed, and the level from which drift is counted (0: none yet).
        self._unchanged = 0
        self._level = 0.0

    def record(self, size: int, seconds: float) -> None:
        """Records a step of `size` samples (at least 1) that took `seconds` (positive and finite)."""
        if size != self._size:
            self._leave()
            self._size, self._present = size, self._others.pop(size, [])
            self._unchanged, self._level = 0, 0.0
            self.largest = max(self.largest, size)
        self._present = [*self._present, seconds][-_KEPT_STEPS:]
        self._unchanged += 1

    def detect_speed_change(self) -> float | None:
        """The factor by which the rank's seconds have changed (above 1: slower); None while its speed has not changed.

        Must be called after every step. A change is returned once, when enough steps have shown it; the seconds of
        other sizes are multiplied by the factor then.
        """
        before, recent = self._present[:-STEPS_TO_JUDGE], sorted(self._present[-STEPS_TO_JUDGE:])
        if len(before) <= STEPS_TO_JUDGE:
            # Asked twice, as the change may have come with the first steps at this size.
            return self._change_between_sizes() if self._unchanged in (STEPS_TO_JUDGE, 2 * STEPS_TO_JUDGE) else None
        if self._unchanged < STEPS_TO_JUDGE:
            return None
        # median_low: an element of the list, never a mean of two, so all machines get the same bits.
        expected = median_low(before)
        limit = 1 + max(_CHANGE, _CHANGE_SPREADS * _spread(before))
        # Outliers are steps that took too long. Among few steps they may be most, so a rank has become faster only if
        # it is beside its faster steps; and one of the recent steps may be such an outlier then.
        slower = recent[0] > expected * limit
        faster = recent[-2] * limit < sorted(before)[len(before) // 4]
        if not slower and not faster:
            return None
        factor = median_low(recent) / expected
        # Scaled, not dropped: the spread of the earlier steps still says how noisy this rank is.
        self._present = [seconds * factor for seconds in before] + self._present[-STEPS_TO_JUDGE:]
        self._rescale(factor)
        self._unchanged, self._level = 0, 0.0
        return factor

    def _change_between_sizes(self) -> float | None:
        """As `detect_speed_change`, for a rank whose time at a new size does not fit that of the last size."""
        if not self._others:
            return None
        seconds, (size, steps) = median_low(self._present[-STEPS_TO_JUDGE:]), list(self._others.items())[-1]
        low, high = sorted((1.0, self._size / size))
        ratio = seconds / median_low(steps)
        if low <= ratio * _PLAUSIBLE and ratio <= high * _PLAUSIBLE:
            return None
        expected = self._estimate(_points(self._others), np.array([self._size], dtype=np.float64))
        factor = seconds / float(expected[0])
        self._rescale(factor)
        # That the speed changed, and not the shape, is a guess here: each size counts as a single step from now on.
        self._present = self._present[-STEPS_TO_JUDGE:]
        self._unchanged, self._level = 0, 0.0
        self._others = {size: [median_low(steps)] for size, steps in self._others.items()}
        return factor

    def follow_drift(self) -> None:
        """Rescales the other sizes if the times at the present size have drifted; called at each check."""
        if len(self._present) < _DRIFT_STEPS:
            return
        recent = median_low(self._present[-_DRIFT_STEPS:])
        if not self._level:
            self._level = recent
        elif abs(recent / self._level - 1) > _DRIFT:
            self._rescale(recent / self._level)
            self._present, self._level = self._present[-_DRIFT_STEPS:], recent

    @property
    def known(self) -> bool:
        """Whether enough steps were recorded to judge the rank."""
        return len(self._present) >= STEPS_TO_JUDGE or bool(self._others)

    @property
    def seconds(self) -> float:
        """Seconds of a step at the present size: the median of the recorded steps."""
        return median_low(self._present)

    @property
    def uncertainty(self) -> float:
        """The relative standard error of `seconds`."""
        # A median of normal noise varies 1.25 times as much as a mean.
        return 1.25 * _spread(self._present) / math.sqrt(len(self._present))

    def table(self, largest: int) -> np.ndarray:
        """Estimated seconds of every size from 1 to `largest`: float64, shape [largest], positive."""
        # A size with too few steps is left out, unless there is no other.
        seen = dict(self._others)
        if len(self._present) >= STEPS_TO_JUDGE or not seen:
            seen[self._size] = self._present
        return self._estimate(_points(seen), np.arange(1, largest + 1, dtype=np.float64))

    def _leave(self) -> None:
        if len(self._present) >= STEPS_TO_JUDGE:
            self._others[self._size] = self._present
        # Insertion order: the size that was left longest ago goes first.
        if len(self._others) > _KEPT_SIZES:
            del self._others[next(iter(self._others))]

    def _rescale(self, factor: float) -> None:
        self._others = {size: [seconds * factor for seconds in steps] for size, steps in self._others.items()}

    def _estimate(self, points: _Points, sizes: np.ndarray) -> np.ndarray:
        bases = self._bases(np.array([size for size, _, _ in points], dtype=np.float64)).tolist()
        if self._profiled is None:
            offset, slope = _line(points)
        else:
            offset, slope = 0.0, _factor(points, bases)
        pull, weight = np.zeros(len(sizes)), np.full(len(sizes), _DOUBT)
        for base, (size, seconds, steps) in zip(bases, points, strict=True):
            distance = np.abs(sizes - size) / np.maximum(sizes, size)
            nearness = np.maximum(0.0, 1 - distance / _REACH) * steps
            pull = pull + nearness * (seconds / (offset + slope * base) - 1)
            weight = weight + nearness
        return (offset + slope * self._bases(sizes)) * (1 + pull / weight)

    def _bases(self, sizes: np.ndarray) -> np.ndarray:
        """The variable in which time is a line: the sizes, or the profile's seconds (proportional beyond its end)."""
        if self._profiled is None:
            return sizes
        end = len(self._profiled)
        return self._profiled[np.minimum(sizes, end).astype(np.int64) - 1] * np.maximum(1.0, sizes / end)

    def state_dict(self) -> dict[str, Any]:
        """JSON values that `load_state_dict` takes."""
        return {
            "largest": self.largest,
            "size": self._size,
            "present": list(self._present),
            "others": [[size, list(steps)] for size, steps in self._others.items()],
            "unchanged": self._unchanged,
            "level": self._level,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            ValueError: it is not what `state_dict` gives.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            raise ValueError(f"found {state!r:.200}, expected an object with the keys {sorted(self.state_dict())}")
        counts = [state["largest"], state["size"], state["unchanged"]]
        others = state["others"]
        pairs = isinstance(others, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in others)
        counts += [size for size, _ in others] if pairs else [None]
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
            raise ValueError(f"found {counts} as sizes and numbers of steps, expected integers of at least 0")
        level = state["level"]
        times = [state["present"], *(steps for _, steps in others), [level] if level else []]
        if not all(isinstance(steps, list) and all(map(_is_time, steps)) for steps in times):
            raise ValueError(f"found times {times!r:.200}, expected lists of positive and finite seconds")
        # Everything was checked above, so a malformed state changes nothing.
        self.largest, self._size, self._unchanged = counts[:3]
        self._present = list(state["present"])
        self._others = {size: list(steps) for size, steps in others}
        self._level = level


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _spread(values: list[float]) -> float:
    """The relative standard deviation of single values, from the median absolute deviation (1.4826 times it)."""
    middle = median_low(values)
    return 1.4826 * median_low([abs(value - middle) for value in values]) / middle


def _points(seen: Mapping[int, list[float]]) -> _Points:
    """(size, seconds, number of steps) of the sizes seen."""
    return [(size, median_low(steps), len(steps)) for size, steps in seen.items()]


def _precision(seconds: float, steps: int) -> float:
    """The inverse variance of the median of `steps` times (pi / 2 times the variance of their mean)."""
    return 1 / (seconds * seconds * (_STEP_SPREAD * _STEP_SPREAD * 1.57 / steps + _MEDIAN_SPREAD * _MEDIAN_SPREAD))


def _factor(points: _Points, bases: list[float]) -> float:
    """The factor that fits the bases to the times by weighted least squares."""
    square_sum = across = 0.0
    for base, (_, seconds, steps) in zip(bases, points, strict=True):
        precision = _precision(seconds, steps)
        square_sum += precision * base * base
        across += precision * base * seconds
    return across / square_sum


def _line(points: _Points) -> tuple[float, float]:
    """Offset and slope of the line closest to the points: weighted least squares, with the offset drawn to 0.

    The draw is that of a normal prior. Sizes close to each other, whose noise would give any slope, then leave time
    nearly proportional to the size; sizes far apart outweigh it.
    """
    unit = size_sum = square_sum = time_sum = across = 0.0
    for size, seconds, steps in points:
        precision = _precision(seconds, steps)
        unit += precision
        size_sum += precision * size
        square_sum += precision * size * size
        time_sum += precision * seconds
        across += precision * size * seconds
    largest, largest_seconds, _ = max(points)
    likely_offset = _OFFSET_SHARE * largest_seconds
    drawn = unit + 1 / (likely_offset * likely_offset)
    offset = max(0.0, (time_sum * square_sum - across * size_sum) / (drawn * square_sum - size_sum * size_sum))
    slope = (across - offset * size_sum) / square_sum
    smallest_slope = _SLOPE_SHARE * largest_seconds / largest
    if slope < smallest_slope:
        slope = smallest_slope
        offset = max(0.0, (time_sum - slope * size_sum) / unit)
    return offset, slope
