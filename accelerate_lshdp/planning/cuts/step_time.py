# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The time at which a rank has finished a step: the formula that both planners minimise.

A rank with k micro-batches of m samples, t = time(m), o = accumulation_overhead_seconds,
l = communication_load_seconds, and C_j the seconds that the buckets j, j + 1, ... take on the network, one after the
other:

    compute(m, k) = k * t + (k - 1) * o + l
    finish(m, k)  = fixed_seconds + (k - 1) * (t + o) + max(t + l, max_j [bucket_ready_j(m) + C_j])

Gradients travel in the last micro-batch only. Without buckets finish is fixed_seconds + compute. It never falls when m
or k grows, which is all that the solvers need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile


class PlanningError(ValueError):
    """A planning problem that is malformed or has no solution on these ranks."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of one rank's micro-batches of 1, 2, ... samples. Float64 arrays, one entry a size.

    Args:
        first: finish(m, 1).
        more: what each further micro-batch adds, t + o.
        time: t.
        overhead: o.
        load: l.
    """

    first: np.ndarray
    more: np.ndarray
    time: np.ndarray
    overhead: float
    load: float

    def finish(self, micro_batch_size: int, steps: int) -> float:
        """Seconds until the rank has finished `steps` micro-batches: finish(m, k) of the module's formula."""
        return float(self.first[micro_batch_size - 1] + (steps - 1) * self.more[micro_batch_size - 1])

    def compute(self, micro_batch_size: int, steps: int) -> float:
        """Seconds of forward and backward of `steps` micro-batches: compute(m, k) of the module's formula."""
        return float(steps * self.time[micro_batch_size - 1] + (steps - 1) * self.overhead + self.load)


def step_times(profiles: Sequence[RankProfile], bucket_seconds: Sequence[float] | None) -> list[StepTimes]:
    """The step times of all ranks, up to each rank's largest micro-batch.

    Ranks with the same profile object share one table: clusters of hundreds of equal ranks are planned from one.

    Raises:
        PlanningError: there is no rank, no micro-batch fits a rank's memory, or buckets and profiles do not match.
    """
    if not profiles:
        raise PlanningError("found no profiles, expected one for each rank: measure the ranks first")
    remaining = _remaining_seconds(bucket_seconds)
    known: dict[int, StepTimes] = {}
    for rank, profile in enumerate(profiles):
        if id(profile) not in known:
            try:
                known[id(profile)] = _rank_times(profile, remaining)
            except ValueError as error:
                raise PlanningError(f"rank {rank}: {error}") from error
    return [known[id(profile)] for profile in profiles]


def _remaining_seconds(bucket_seconds: Sequence[float] | None) -> list[float] | None:
    """C_j of each bucket: seconds from the start of its transfer to the end of the last one on a busy network."""
    if bucket_seconds is None:
        return None
    seconds = list(bucket_seconds)
    for value in seconds:
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
            raise PlanningError(f"found {value!r} in bucket_seconds, expected finite seconds of at least 0")
    # fsum rounds once, however many buckets there are: the verifier compares with exact sums.
    return [math.fsum(seconds[place:]) for place in range(len(seconds))]


def _rank_times(profile: RankProfile, remaining: Sequence[float] | None) -> StepTimes:
    largest = profile.largest_micro_batch
    time = profile.time.table(largest)
    load = profile.communication_load_seconds
    # Without buckets nothing overlaps, and the last micro-batch ends with its backward.
    last = time + load
    if remaining is not None:
        ready = profile.bucket_ready or ()
        if len(ready) != len(remaining):
            raise ValueError(
                f"found {len(ready)} curves in bucket_ready for {len(remaining)} bucket_seconds, expected one for"
                " each bucket: measure when buckets are ready, or plan without bucket_seconds"
            )
        for curve, seconds in zip(ready, remaining, strict=True):
            last = np.maximum(last, curve.table(largest) + seconds)
    overhead = profile.accumulation_overhead_seconds
    return StepTimes(profile.fixed_seconds + last, time + overhead, time, overhead, load)
