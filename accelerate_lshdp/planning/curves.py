# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the planner knows about a rank: how long a micro-batch takes, and the largest one that fits its memory."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TimeCurve:
    """Seconds of one forward and backward pass as a non-decreasing function of the micro-batch size.

    The curve is the running maximum of the linear interpolation of the measured points: measured times have noise and
    dips (sizes that suit the kernels), and a rank must not seem to gain time by taking more samples. Below the first
    measured size the curve keeps the first measured time: an upper bound, as fewer samples take no longer. Beyond the
    last measured size there is no curve: memory may end there, and kernels may change.

    Args:
        batch_sizes: measured micro-batch sizes in samples, strictly increasing, at least 1.
        seconds: the time measured at each of them, positive and finite.

    Raises:
        ValueError: the points are empty, of unequal number, not increasing, or not positive and finite.
    """

    batch_sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = tuple(_integer(size, "batch_sizes") for size in self.batch_sizes)
        seconds = tuple(float(value) for value in self.seconds)
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(
                f"found {len(sizes)} batch sizes and {len(seconds)} times, expected equal numbers of at least 1:"
                " give one time for each measured size"
            )
        if sizes[0] < 1 or any(right <= left for left, right in zip(sizes, sizes[1:], strict=False)):
            raise ValueError(
                f"found batch sizes {list(sizes)}, expected strictly increasing ones of at least 1: sort the"
                " measurements and keep one time for each size"
            )
        if not all(math.isfinite(value) and value > 0 for value in seconds):
            raise ValueError(f"found times {list(seconds)}, expected positive and finite seconds: measure again")
        object.__setattr__(self, "batch_sizes", sizes)
        object.__setattr__(self, "seconds", seconds)

    def __call__(self, batch_size: int) -> float:
        """Seconds of a micro-batch of `batch_size` samples.

        Raises:
            ValueError: `batch_size` is below 1 or beyond the last measured size.
        """
        return float(self._evaluate(np.array([self._checked(batch_size)]))[0])

    def table(self, largest: int) -> np.ndarray:
        """Seconds of every micro-batch size from 1 to `largest`: float64, shape [largest], never decreasing.

        Raises:
            ValueError: `largest` is below 1 or beyond the last measured size.
        """
        return self._evaluate(np.arange(1, self._checked(largest) + 1))

    def _checked(self, batch_size: int) -> int:
        batch_size = _integer(batch_size, "batch_size")
        if not 1 <= batch_size <= self.batch_sizes[-1]:
            raise ValueError(
                f"found batch size {batch_size}, expected 1 to {self.batch_sizes[-1]}, the largest measured: measure"
                " larger batches, the curve is not extrapolated"
            )
        return batch_size

    def _evaluate(self, batch_sizes: np.ndarray) -> np.ndarray:
        measured, seconds = np.array(self.batch_sizes), np.array(self.seconds)
        reached = np.maximum.accumulate(seconds)
        following = np.searchsorted(measured, batch_sizes, side="right")
        floor = reached[np.maximum(following - 1, 0)]
        ceiling = reached[np.minimum(following, len(measured) - 1)]
        # The ceiling takes back what rounding may add just before a measured point: the curve must not decrease there.
        return np.clip(np.interp(batch_sizes, measured, seconds), floor, ceiling)


@dataclass(frozen=True, slots=True)
class RankProfile:
    """One rank as the planner sees it.

    Args:
        time: its curve of seconds by micro-batch size.
        max_micro_batch_size: the largest micro-batch that fits its memory, in samples; at most the largest measured.

    Raises:
        ValueError: `max_micro_batch_size` is below 1 or beyond the curve.
    """

    time: TimeCurve
    max_micro_batch_size: int

    def __post_init__(self) -> None:
        largest = _integer(self.max_micro_batch_size, "max_micro_batch_size")
        if not 1 <= largest <= self.time.batch_sizes[-1]:
            raise ValueError(
                f"found max_micro_batch_size {largest}, expected 1 to {self.time.batch_sizes[-1]}, the largest"
                " measured: measure up to the limit, the curve is not extrapolated"
            )
        object.__setattr__(self, "max_micro_batch_size", largest)


def _integer(value: object, name: str) -> int:
    """`value` as int, NumPy integers included. A bool or a float is a mistake, whatever its value."""
    if isinstance(value, bool):
        raise ValueError(f"found {value} in {name}, expected an integer number of samples")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"found {value!r} in {name}, expected an integer number of samples") from None
