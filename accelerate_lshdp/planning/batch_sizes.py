# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exact batch sizes: the cut of a fixed global batch over unequal ranks that makes the slowest rank finish earliest.

The problem is min max_i t_i(b_i) over integers 1 <= b_i <= m_i with sum b_i = B. Tabulate each t_i at 1..m_i. As t_i
does not decrease, rank i can take k samples within T seconds exactly if its k-th entry is <= T; so within T the ranks
together can take as many samples as their tables have entries <= T. The optimum is the B-th smallest entry of all
tables, or the slowest rank's time for its one obligatory sample if that is longer. Nothing is searched or rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelerate_lshdp.planning.curves import RankProfile
from accelerate_lshdp.planning.step_time import PlanningError, step_times


# Two curves can reach the same time at different sizes and come out a few units in the last place apart. Such times
# count as equal, so that rounding does not decide between cuts.
_TIE = 1e-13


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """An optimal cut of the global batch.

    Args:
        batch_sizes: samples of each rank, in rank order.
        micro_batches: (micro-batch size, accumulation steps) of each rank.
        rank_seconds: seconds of forward and backward of each rank, by its curve.
        step_seconds: when the slowest rank has finished its step, which no other cut undercuts.
        certificate: JSON values that let `verify_certificate` check that claim.
    """

    batch_sizes: list[int]
    micro_batches: list[tuple[int, int]]
    rank_seconds: list[float]
    step_seconds: float
    certificate: dict[str, Any]

    @property
    def total_batch_size(self) -> int:
        """Samples in the global batch."""
        return sum(self.batch_sizes)

    @property
    def samples_per_second(self) -> float:
        """Samples in the global batch by the seconds of a step."""
        return self.total_batch_size / self.step_seconds

    @property
    def idle_fraction(self) -> float:
        """1 - mean / max of the ranks' seconds of forward and backward."""
        return 1 - sum(self.rank_seconds) / (len(self.rank_seconds) * max(self.rank_seconds))


def plan_fixed_total(
    profiles: Sequence[RankProfile],
    total_batch_size: int,
    *,
    allow_accumulation: bool = False,
    bucket_seconds: Sequence[float] | None = None,
    shard_groups: Sequence[Sequence[int]] | None = None,
) -> BatchSizes:
    """Cuts a global batch over the ranks so that the slowest rank finishes as early as any cut allows.

    Among the optimal cuts it takes the one with the smallest difference between largest and smallest batch, then the
    lexicographically smallest. Time and memory are linear in the sum of the ranks' max_micro_batch_size.

    Args:
        profiles: one for each rank.
        total_batch_size: samples in the global batch.

    Raises:
        PlanningError: there is no rank, or no cut gives every rank between one sample and its maximum.
    """
    if allow_accumulation:
        raise NotImplementedError("accumulation is not planned yet")
    times = step_times(profiles, bucket_seconds)
    total = _feasible_total([len(time.first) for time in times], total_batch_size)
    tables = [time.first for time in times]

    slowest_single = max(table[0] for table in tables)
    filled = np.partition(np.concatenate(tables), total - 1)[total - 1]
    optimum = float(max(slowest_single, filled))

    caps = np.array([np.searchsorted(table, optimum * (1 + _TIE), side="right") for table in tables])
    sizes = _most_even(caps, total).tolist()
    rank_seconds = [time.compute(size, 1) for time, size in zip(times, sizes, strict=True)]
    step = max(float(table[size - 1]) for table, size in zip(tables, sizes, strict=True))
    below = [int(np.searchsorted(table, optimum, side="left")) for table in tables]
    return BatchSizes(
        batch_sizes=sizes,
        micro_batches=[(size, 1) for size in sizes],
        rank_seconds=rank_seconds,
        step_seconds=step,
        certificate={
            "total_batch_size": total,
            "batch_sizes": list(sizes),
            "step_seconds": step,
            "largest_batches_below": below,
        },
    )


def _feasible_total(maxima: Sequence[int], total_batch_size: int) -> int:
    if isinstance(total_batch_size, bool) or not isinstance(total_batch_size, (int, np.integer)):
        raise PlanningError(f"found total_batch_size {total_batch_size!r}, expected an integer number of samples")
    if total_batch_size < len(maxima):
        raise PlanningError(
            f"found total_batch_size {total_batch_size}, expected at least {len(maxima)}, one sample for each rank:"
            f" the nearest feasible total is {len(maxima)}"
        )
    if total_batch_size > sum(maxima):
        raise PlanningError(
            f"found total_batch_size {total_batch_size}, expected at most {sum(maxima)}, the sum of the ranks'"
            f" max_micro_batch_size {maxima}: the nearest feasible total is {sum(maxima)}"
        )
    return int(total_batch_size)


def _most_even(caps: np.ndarray, total: int) -> np.ndarray:
    """The cut of `total` with 1 <= b_i <= caps[i] and the least max(b) - min(b), then the lexicographically smallest.

    max(b) is at least H, the smallest H for which sum(min(caps, H)) >= total, and min(b) is at most
    L = min(min(caps), total // n). Both can be met at once, as n*L <= total <= sum(min(caps, H)). So every cut within
    [L, H] is most even, and the lexicographically smallest of them starts at L and fills up from the last rank.
    """
    largest, upper = 1, int(caps.max())
    while largest < upper:
        middle = (largest + upper) // 2
        if np.minimum(caps, middle).sum() >= total:
            upper = middle
        else:
            largest = middle + 1
    smallest = min(int(caps.min()), total // len(caps))
    room = np.minimum(caps, largest) - smallest
    left = total - smallest * len(caps)
    # What the ranks behind each rank can hold is taken off first.
    behind = np.cumsum(room[::-1])[::-1] - room
    return smallest + np.clip(left - behind, 0, room)
