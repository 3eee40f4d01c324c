# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Curves of seconds and bytes by micro-batch size, and the profile of one rank, from which the planner plans."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
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
        sizes = _checked_sizes(self.batch_sizes, self.seconds, "times")
        # Plain floats: equal curves must have equal fingerprints, and not all of NumPy's scalars go into JSON.
        seconds = tuple(float(value) for value in self.seconds)
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
        return _within(batch_size, self.batch_sizes[-1])

    def _evaluate(self, batch_sizes: np.ndarray) -> np.ndarray:
        measured, seconds = np.array(self.batch_sizes), np.array(self.seconds)
        # np.interp is constant beyond the ends, which is the upper bound wanted below the first measured size.
        reached = np.maximum.accumulate(seconds)
        following = np.searchsorted(measured, batch_sizes, side="right")
        floor = reached[np.maximum(following - 1, 0)]
        ceiling = reached[np.minimum(following, len(measured) - 1)]
        # The ceiling takes back what rounding may add just before a measured point: the curve must not decrease there.
        return np.clip(np.interp(batch_sizes, measured, seconds), floor, ceiling)


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Peak bytes of a micro-batch as a non-decreasing function of its size.

    As a `TimeCurve`: the running maximum of the linear interpolation of the measured points, the first value below
    the first measured size, and nothing beyond the last.

    Args:
        batch_sizes: measured micro-batch sizes in samples, strictly increasing, at least 1.
        bytes: the peak memory measured at each of them, positive.

    Raises:
        ValueError: the points are empty, of unequal number, not increasing, or not positive integers.
    """

    batch_sizes: tuple[int, ...]
    bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = _checked_sizes(self.batch_sizes, self.bytes, "numbers of bytes")
        peaks = tuple(_integer(value, "bytes", "number of bytes") for value in self.bytes)
        if min(peaks) < 1:
            raise ValueError(f"found bytes {list(peaks)}, expected positive numbers: measure again")
        object.__setattr__(self, "batch_sizes", sizes)
        object.__setattr__(self, "bytes", peaks)

    def __call__(self, batch_size: int) -> float:
        """Bytes of a micro-batch of `batch_size` samples.

        Raises:
            ValueError: `batch_size` is below 1 or beyond the last measured size.
        """
        size = _within(batch_size, self.batch_sizes[-1])
        # The running maximum: larger of the interpolated value and of every measured one up to this size.
        reached = [peak for measured, peak in zip(self.batch_sizes, self.bytes, strict=True) if measured <= size]
        return float(max([np.interp(size, self.batch_sizes, self.bytes), *reached]))

    def largest_within(self, limit_bytes: int) -> int:
        """The largest measured or interpolated size that needs at most `limit_bytes`, 0 if there is none."""
        largest = 0
        size, peak = 0, self.bytes[0]
        for next_size, next_peak in zip(self.batch_sizes, self.bytes, strict=True):
            if next_peak > limit_bytes:
                # Between two points memory is linear. Integers: a size that exactly meets the limit is not lost.
                if peak <= limit_bytes:
                    largest = size + (limit_bytes - peak) * (next_size - size) // (next_peak - peak)
                break
            largest = size = next_size
            peak = next_peak
        return largest


@dataclass(frozen=True, slots=True)
class RankProfile:
    """The times and limits of one rank, from which the planner plans.

    Args:
        time: its curve of forward and backward seconds by micro-batch size.
        max_micro_batch_size: the largest micro-batch to be used, in samples; at most the largest measured.
        accumulation_overhead_seconds: seconds that each micro-batch but the last takes beyond forward and backward.
        bucket_ready: for each bucket of gradients, in the order in which buckets travel, the seconds from the start of
            the last micro-batch until this rank has the bucket ready, by micro-batch size. None: not measured.
        communication_load_seconds: seconds by which sending gradients prolongs the last micro-batch, as it uses the
            rank's processor. They pass while the rank waits for the network, and are not added to that wait.
        fixed_seconds: seconds of every step that do not depend on the batch: the optimizer step.
        memory: its curve of peak bytes by micro-batch size.
        memory_limit_bytes: largest number of bytes that a micro-batch may need by `memory`. None: no limit.

    Raises:
        ValueError: a value is impossible, `max_micro_batch_size` is beyond a curve of seconds, or there is a limit of
            memory without a curve.
    """

    time: TimeCurve
    max_micro_batch_size: int
    accumulation_overhead_seconds: float = 0.0
    bucket_ready: Sequence[TimeCurve] | None = None
    communication_load_seconds: float = 0.0
    fixed_seconds: float = 0.0
    memory: MemoryCurve | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        largest = _integer(self.max_micro_batch_size, "max_micro_batch_size")
        ready = None if self.bucket_ready is None else tuple(self.bucket_ready)
        # Every curve has to reach the largest size that may be planned, as none is extrapolated.
        for curve in (self.time, *(ready or ())):
            if not 1 <= largest <= curve.batch_sizes[-1]:
                raise ValueError(
                    f"found max_micro_batch_size {largest}, expected 1 to {curve.batch_sizes[-1]}, the largest"
                    " measured: measure up to the limit, the curve is not extrapolated"
                )
        for name in ("accumulation_overhead_seconds", "communication_load_seconds", "fixed_seconds"):
            value = float(getattr(self, name))
            if not 0 <= value < math.inf:
                raise ValueError(f"found {name} {value}, expected finite seconds of at least 0: measure again")
            object.__setattr__(self, name, value)
        if self.memory_limit_bytes is not None:
            if self.memory is None:
                raise ValueError(
                    f"found memory_limit_bytes {self.memory_limit_bytes} without a memory curve, expected both:"
                    " nothing says which micro-batches need less"
                )
            limit = _integer(self.memory_limit_bytes, "memory_limit_bytes", "number of bytes")
            object.__setattr__(self, "memory_limit_bytes", limit)
        object.__setattr__(self, "max_micro_batch_size", largest)
        object.__setattr__(self, "bucket_ready", ready)

    @property
    def largest_micro_batch(self) -> int:
        """The largest micro-batch, in samples, within `max_micro_batch_size` and `memory_limit_bytes`.

        Raises:
            ValueError: not even one sample fits the memory.
        """
        if self.memory_limit_bytes is None:
            return self.max_micro_batch_size
        within = self.memory.largest_within(self.memory_limit_bytes)
        if within < 1:
            raise ValueError(
                f"found a memory limit of {self.memory_limit_bytes} bytes, expected at least {self.memory.bytes[0]},"
                " what one sample needs: no micro-batch fits. Raise the limit, or leave the rank out"
            )
        return min(self.max_micro_batch_size, within)


def _checked_sizes(batch_sizes: Sequence[int], values: Sequence[object], what: str) -> tuple[int, ...]:
    sizes = tuple(_integer(size, "batch_sizes") for size in batch_sizes)
    if not sizes or len(sizes) != len(values):
        raise ValueError(
            f"found {len(sizes)} batch sizes and {len(values)} {what}, expected equal numbers of at least 1:"
            " give one for each measured size"
        )
    if sizes[0] < 1 or any(right <= left for left, right in zip(sizes, sizes[1:], strict=False)):
        raise ValueError(
            f"found batch sizes {list(sizes)}, expected strictly increasing ones of at least 1: sort the"
            " measurements and keep one for each size"
        )
    return sizes


def _within(batch_size: int, largest: int) -> int:
    batch_size = _integer(batch_size, "batch_size")
    if not 1 <= batch_size <= largest:
        raise ValueError(
            f"found batch size {batch_size}, expected 1 to {largest}, the largest measured: measure larger batches,"
            " the curve is not extrapolated"
        )
    return batch_size


def _integer(value: object, name: str, unit: str = "number of samples") -> int:
    """`value` as int, NumPy integers included. A bool or a float is a mistake, whatever its value."""
    # operator.index accepts True as 1, and refuses every float, also 4.0.
    if isinstance(value, bool):
        raise ValueError(f"found {value} in {name}, expected an integer {unit}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"found {value!r} in {name}, expected an integer {unit}") from None
