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


# Two curves can reach the same time at different sizes and come out a few units in the last place apart. Such times
# count as equal, so that rounding does not decide between cuts.
_TIE = 1e-13


class PlanningError(ValueError):
    """What was asked of the planner cannot be done on these ranks."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """An optimal cut of the global batch.

    Args:
        batch_sizes: samples of each rank, in rank order.
        micro_batches: (micro-batch size, accumulation steps) of each rank.
        rank_seconds: compute seconds of each rank, by its curve.
        step_seconds: their maximum, which no other cut undercuts.
        certificate: JSON values that let `verify_certificate` check that claim.
    """

    batch_sizes: list[int]
    micro_batches: list[tuple[int, int]]
    rank_seconds: list[float]
    step_seconds: float
    certificate: dict[str, Any]


def plan_fixed_total(profiles: Sequence[RankProfile], total_batch_size: int) -> BatchSizes:
    """Cuts a global batch over the ranks so that the slowest rank finishes as early as any cut allows.

    Among the optimal cuts it takes the one with the smallest difference between largest and smallest batch, then the
    lexicographically smallest. Time and memory are linear in the sum of the ranks' max_micro_batch_size.

    Args:
        profiles: one for each rank.
        total_batch_size: samples in the global batch.

    Raises:
        PlanningError: there is no rank, or no cut gives every rank between one sample and its maximum.
    """
    total = _feasible_total(profiles, total_batch_size)
    tables = [profile.time.table(profile.max_micro_batch_size) for profile in profiles]

    slowest_single = max(table[0] for table in tables)
    filled = np.partition(np.concatenate(tables), total - 1)[total - 1]
    optimum = float(max(slowest_single, filled))

    caps = np.array([np.searchsorted(table, optimum * (1 + _TIE), side="right") for table in tables])
    sizes = _most_even(caps, total).tolist()
    rank_seconds = [float(table[size - 1]) for table, size in zip(tables, sizes, strict=True)]
    below = [int(np.searchsorted(table, optimum, side="left")) for table in tables]
    return BatchSizes(
        batch_sizes=sizes,
        micro_batches=[(size, 1) for size in sizes],
        rank_seconds=rank_seconds,
        step_seconds=max(rank_seconds),
        certificate={
            "total_batch_size": total,
            "batch_sizes": list(sizes),
            "step_seconds": max(rank_seconds),
            "largest_batches_below": below,
        },
    )


def _feasible_total(profiles: Sequence[RankProfile], total_batch_size: int) -> int:
    if not profiles:
        raise PlanningError("found no profiles, expected one for each rank: measure the ranks first")
    if isinstance(total_batch_size, bool) or not isinstance(total_batch_size, (int, np.integer)):
        raise PlanningError(f"found total_batch_size {total_batch_size!r}, expected an integer number of samples")
    maxima = [profile.max_micro_batch_size for profile in profiles]
    if total_batch_size < len(profiles):
        raise PlanningError(
            f"found total_batch_size {total_batch_size}, expected at least {len(profiles)}, one sample for each rank:"
            f" the nearest feasible total is {len(profiles)}"
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
