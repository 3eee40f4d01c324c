# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exact batch sizes: the cut of a fixed global batch over unequal ranks that makes the slowest rank finish earliest.

The problem is min max_i finish_i(m_i, k_i) over integers 1 <= m_i <= M_i, k_i >= 1 with sum k_i * m_i = B (see
`step_time` for finish). With one micro-batch a rank, tabulate each finish_i at 1..M_i. As it does not decrease, rank i
can take m samples within T seconds exactly if its m-th entry is <= T; so within T the ranks together can take as many
samples as their tables have entries <= T. The optimum is the B-th smallest entry of all tables, or the slowest rank's
time for its one obligatory sample if that is longer. Nothing is searched or rounded. Several micro-batches make
holes in what ranks can take within T: see `accumulation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.planning.cuts.accumulation import AccumulationTables
from accelerate_lshdp.planning.cuts.bounds import largest_micro_batches_below
from accelerate_lshdp.planning.cuts.feasible_totals import checked_total, most_steps
from accelerate_lshdp.planning.cuts.problem import TIE, Problem, pose_problem
from accelerate_lshdp.planning.cuts.tie_breaking import most_even_cut


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """An optimal cut of the global batch.

    Args:
        batch_sizes: samples of each rank, in rank order.
        micro_batches: (micro-batch size, accumulation steps) of each rank.
        rank_seconds: seconds of forward and backward of each rank, by its curve, with what accumulating and sending
            gradients take.
        step_seconds: seconds of a step, which no other cut undercuts (fixed total) or makes more samples a second with
            (maximum throughput).
        certificate: JSON values from which `verify_certificate` checks that the cut is optimal.
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
        """Throughput: samples in the global batch divided by the seconds of a step."""
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

    A rank with k micro-batches of m samples, t = time(m), o = accumulation_overhead_seconds and
    l = communication_load_seconds, finishes after

        fixed_seconds + (k - 1) * (t + o) + max(t + l, max_j [bucket_ready_j(m) + C_j])

    where C_j is the sum of bucket_seconds[j:]. Among the optimal cuts it takes the one with the smallest difference
    between largest and smallest batch, then the fewest micro-batches in total, then the lexicographically smallest.
    Without accumulation time and memory are linear in the sum of the ranks' largest micro-batches.

    Args:
        profiles: one for each rank.
        total_batch_size: samples in the global batch.
        allow_accumulation: whether a rank may have more than one micro-batch.
        bucket_seconds: of each bucket of gradients on the network, in the order in which they travel while the
            backward goes on; None: nothing overlaps.
        shard_groups: ranks that need equal numbers of micro-batches; each rank in one group. None: each rank alone.

    Raises:
        PlanningError: there is no rank, no micro-batch fits a rank's memory, options do not match the profiles, or no
            cut is possible; it names the nearest total for which there is one.
    """
    problem = pose_problem(profiles, allow_accumulation, bucket_seconds, shard_groups)
    # The optimum is the least time; of all cuts within it (up to rounding), the tie rules choose one.
    total = checked_total(problem, total_batch_size)
    if allow_accumulation:
        tables = AccumulationTables(problem, most_steps(problem, total))
        optimum = tables.least_seconds(total)
        micro_batches = most_even_cut(tables.within(optimum * (1 + TIE)), problem.groups, total)
    else:
        optimum, sizes = _cut_once(problem, total)
        micro_batches = [(size, 1) for size in sizes]
    step = step_seconds(problem, micro_batches)
    certificate = {
        "kind": "fixed_total",
        "total_batch_size": total,
        **problem.statement(),
        "micro_batches": [list(pair) for pair in micro_batches],
        "step_seconds": step,
        "largest_micro_batches_below": largest_micro_batches_below(problem, optimum, total),
    }
    return batch_sizes_of(problem, micro_batches, step, certificate)


def step_seconds(problem: Problem, micro_batches: Sequence[tuple[int, int]]) -> float:
    """Seconds until the slowest rank has finished its micro-batches."""
    return max(time.finish(*pair) for time, pair in zip(problem.times, micro_batches, strict=True))


def batch_sizes_of(
    problem: Problem, micro_batches: Sequence[tuple[int, int]], step: float, certificate: dict[str, Any]
) -> BatchSizes:
    """The result of a planner from (micro-batch size, steps) of each rank, step seconds and certificate."""
    return BatchSizes(
        batch_sizes=[size * steps for size, steps in micro_batches],
        micro_batches=list(micro_batches),
        rank_seconds=[time.compute(*pair) for time, pair in zip(problem.times, micro_batches, strict=True)],
        step_seconds=step,
        certificate=certificate,
    )


def _cut_once(problem: Problem, total: int) -> tuple[float, list[int]]:
    """The least step time of any cut with one micro-batch a rank, and the best such cut."""
    tables = [time.first for time in problem.times]
    slowest_single = max(table[0] for table in tables)
    # Selection instead of sorting: linear in the number of entries.
    filled = np.partition(np.concatenate(tables), total - 1)[total - 1]
    optimum = float(max(slowest_single, filled))
    caps = np.array([np.searchsorted(table, optimum * (1 + TIE), side="right") for table in tables])
    return optimum, _most_even(caps, total).tolist()


def _most_even(caps: np.ndarray, total: int) -> np.ndarray:
    """The cut of `total` with 1 <= b_i <= caps[i] and the least max(b) - min(b), then the lexicographically smallest.

    max(b) is at least H, the smallest H for which sum(min(caps, H)) >= total, and min(b) is at most
    L = min(min(caps), total // n). Both can be met at once, as n*L <= total <= sum(min(caps, H)). So every cut within
    [L, H] is most even, and the lexicographically smallest of them starts at L and fills up from the last rank.
    """
    # Bisection for H, the least maximum with which the total still fits.
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
    # From the last rank to the first: each takes what the ranks behind it cannot hold, so early ranks stay small.
    behind = np.cumsum(room[::-1])[::-1] - room
    return smallest + np.clip(left - behind, 0, room)
