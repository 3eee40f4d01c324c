# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Maximum throughput: the global batch, and its cut over the ranks, with the most samples per second.

Within T seconds of work the ranks can finish at most N(T) samples, the sum of what each can finish. N grows only at
finish times of micro-batches, so the best N(T) / (T + communication) is at one of these, and all of them are tried. A
shard group acts as one rank: it can do micro-batches whose sizes sum to s when the s-th smallest finish time of its
ranks' tables is within T, and so is its slowest rank's single sample.

Where global batches have to be a multiple of some number, N(T) is rounded down to one: without accumulation the ranks
can do every number of samples up to N(T), from one a rank on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.planning.cuts.accumulation import AccumulationTables
from accelerate_lshdp.planning.cuts.batch_sizes import BatchSizes, batch_sizes_of, step_seconds
from accelerate_lshdp.planning.cuts.problem import TIE, Problem, is_integer, pose_problem
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.cuts.tie_breaking import most_even_cut


def plan_max_throughput(
    profiles: Sequence[RankProfile],
    communication_seconds: float = 0.0,
    *,
    allow_accumulation: bool = False,
    bucket_seconds: Sequence[float] | None = None,
    shard_groups: Sequence[Sequence[int]] | None = None,
    max_accumulation_steps: int | None = None,
    multiple_of: int = 1,
) -> BatchSizes:
    """Chooses the global batch and its cut with the most samples a second: the greatest

        sum_i k_i * m_i / (max_i finish_i(m_i, k_i) + communication_seconds)

    where a rank with k micro-batches of m samples, t = time(m), o = accumulation_overhead_seconds and
    l = communication_load_seconds, finishes after

        fixed_seconds + (k - 1) * (t + o) + max(t + l, max_j [bucket_ready_j(m) + C_j])

    and C_j is the sum of bucket_seconds[j:]. Ties (to a relative 1e-13): the smallest difference between largest and
    smallest batch, then the fewest micro-batches in total, then the lexicographically smallest batch sizes. Time and
    memory are linear in the sum of the ranks' largest micro-batches, times `max_accumulation_steps`.

    Args:
        profiles: one for each rank.
        communication_seconds: seconds of every step after the slowest rank has finished; communication that overlaps
            is not part of them.
        allow_accumulation: whether a rank may have more than one micro-batch.
        bucket_seconds: seconds of each bucket of gradients on the network, in the order in which they travel while
            the backward goes on; None: nothing overlaps.
        shard_groups: ranks that need equal numbers of micro-batches; each rank in one group. None: each rank alone.
        max_accumulation_steps: the most micro-batches that a rank may have; needed with, and only with, accumulation.
        multiple_of: the total has to be a multiple of it, such as the number of ranks, by which a script's own batch
            size is multiplied. More than 1 is for plans without accumulation.

    Raises:
        PlanningError: there is no rank, nothing fits a rank's memory, no multiple fits, or options do not match.
    """
    problem = pose_problem(profiles, allow_accumulation, bucket_seconds, shard_groups)
    most_steps = _checked_most_steps(allow_accumulation, max_accumulation_steps)
    communication = _checked_communication(communication_seconds)
    throughput = _Throughput.of(problem, most_steps, communication, _checked_multiple(multiple_of, allow_accumulation))
    micro_batches = _break_ties(problem, throughput, most_steps)
    seconds = step_seconds(problem, micro_batches)
    total = sum(size * steps for size, steps in micro_batches)
    certificate = {
        "kind": "max_throughput",
        "total_batch_size": total,
        **problem.statement(),
        "max_accumulation_steps": max_accumulation_steps,
        "communication_seconds": communication,
        "micro_batches": [list(pair) for pair in micro_batches],
        "step_seconds": seconds + communication,
        "check_seconds": throughput.check_seconds(total / (seconds + communication)),
    }
    # Left out otherwise: certificates of plans without it keep the form that earlier versions check.
    if multiple_of > 1:
        certificate["multiple_of"] = int(multiple_of)
    return batch_sizes_of(problem, micro_batches, seconds + communication, certificate)


def _checked_most_steps(allow_accumulation: bool, max_accumulation_steps: int | None) -> int:
    if allow_accumulation and max_accumulation_steps is None:
        raise PlanningError(
            "found allow_accumulation without max_accumulation_steps, expected both: with ever more micro-batches the"
            " samples a second may grow without an end. Give a limit, or plan_fixed_total a total"
        )
    if max_accumulation_steps is None:
        return 1
    if not allow_accumulation:
        raise PlanningError(
            f"found max_accumulation_steps {max_accumulation_steps!r} without allow_accumulation, expected both or"
            " neither"
        )
    if not is_integer(max_accumulation_steps) or max_accumulation_steps < 1:
        raise PlanningError(
            f"found max_accumulation_steps {max_accumulation_steps!r}, expected an integer of at least 1"
        )
    return int(max_accumulation_steps)


def _checked_multiple(multiple_of: int, allow_accumulation: bool) -> int:
    if not is_integer(multiple_of) or multiple_of < 1:
        raise PlanningError(f"found multiple_of {multiple_of!r}, expected an integer of at least 1")
    if multiple_of > 1 and allow_accumulation:
        raise PlanningError(
            f"found multiple_of {multiple_of} with allow_accumulation, expected one or the other: with several"
            " micro-batches not every number of samples can be made"
        )
    return int(multiple_of)


def _checked_communication(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
        raise PlanningError(f"found communication_seconds {seconds!r}, expected finite seconds of at least 0")
    return float(seconds)


@dataclass(frozen=True, slots=True)
class _Throughput:
    """N(T) as a step function: from seconds[j] until seconds[j + 1] the ranks finish at most samples[j].

    Both arrays increase. Before seconds[0] some rank cannot finish a sample, or all ranks together not enough for the
    smallest total.
    """

    seconds: np.ndarray
    samples: np.ndarray
    communication: float

    @classmethod
    def of(cls, problem: Problem, most_steps: int, communication: float, multiple_of: int) -> _Throughput:
        group, seconds, samples = _finish_times(problem, most_steps)
        # What a group can do at most when time goes on: a running maximum, group by group. The offset makes every
        # value of a group larger than all of the groups before it, so that one pass serves all groups.
        order = np.lexsort((seconds, group))
        group, seconds, samples = group[order], seconds[order], samples[order]
        offset = group * (samples.max() + 1)
        best = np.maximum.accumulate(samples + offset) - offset
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        gained = np.diff(best, prepend=0)
        gained[starts] = best[starts]
        first = seconds[starts].max()

        # Merge the groups: at each finish time N grows by what one group gained.
        order = np.argsort(seconds, kind="stable")
        seconds, samples = seconds[order], np.cumsum(gained[order])
        last_of_equal = np.append(np.diff(seconds) > 0, True)
        kept = last_of_equal & (seconds >= first)
        seconds, samples = seconds[kept], samples[kept]
        whole = samples // multiple_of * multiple_of
        if whole[-1] < len(problem.times):  # at least one sample a rank
            raise PlanningError(
                f"found {samples[-1]} samples as the most that fit all ranks together, expected room for a multiple of"
                f" {multiple_of}"
            )
        grown = (np.diff(whole, prepend=0) > 0) & (whole >= len(problem.times))
        return cls(seconds[grown], whole[grown], communication)

    def best(self) -> list[tuple[float, int]]:
        """(T in seconds, N(T) in samples) of the highest throughput, with all ties."""
        # Times a few units in the last place apart are one time: N is read off at the end of the tolerance.
        within = np.searchsorted(self.seconds, self.seconds * (1 + TIE), side="right") - 1
        samples = self.samples[within]
        rate = samples / (self.seconds + self.communication)
        ties = np.flatnonzero(rate >= rate.max() * (1 - TIE))
        # Times that are equal but for rounding give the same number: the first of them stands for all.
        _, first = np.unique(samples[ties], return_index=True)
        return [(float(self.seconds[tie]), int(samples[tie])) for tie in ties[first]]

    def check_seconds(self, rate: float) -> list[float]:
        """The times of a certificate (see `proofs.throughput`), in seconds.

        Times t_0 < t_1 < ..., t_0 the first at which all ranks finish some samples, such that up to t_(j + 1) at most
        rate * (t_j + communication) samples are finished.

        Args:
            rate: samples per second of the choice.
        """
        times = [float(self.seconds[0])]
        while True:
            # Ties may lie above the chosen rate by their tolerance; the verification allows more than this.
            settled = rate * (times[-1] + self.communication) * (1 + 5 * TIE)
            following = int(np.searchsorted(self.samples, settled, side="right"))
            if following == len(self.samples):
                return times
            times.append(float(self.seconds[following]))


def _finish_times(problem: Problem, most_steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat arrays with one entry for each group, number k of micro-batches and sum s of their sizes over the ranks.

    Returns:
        The index of the group, the seconds at which it has finished, and its samples k * s.
    """
    steps = np.arange(most_steps)[:, None]
    groups, seconds, samples = [], [], []
    for index, members in enumerate(problem.groups):
        times = [problem.times[rank] for rank in members]
        # One row for each k. A group's micro-batch sizes grow where that takes the least time.
        finish = np.concatenate([time.first + steps * time.more for time in times], axis=1)
        if len(members) > 1:
            finish.sort(axis=1)
            slowest = np.max([time.first[:1] + steps * time.more[:1] for time in times], axis=0)
            finish = np.maximum(finish, slowest)[:, len(members) - 1 :]
        sums = np.arange(len(members), len(members) + finish.shape[1])
        groups.append(np.full(finish.size, index))
        seconds.append(finish.ravel())
        samples.append(((steps + 1) * sums).ravel())
    return np.concatenate(groups), np.concatenate(seconds), np.concatenate(samples)


def _break_ties(problem: Problem, throughput: _Throughput, most_steps: int) -> list[tuple[int, int]]:
    """The choice that the tie rules take among those with the highest throughput."""
    tables = AccumulationTables(problem, [most_steps] * len(problem.groups))

    def order(micro_batches: list[tuple[int, int]]) -> tuple:
        sizes = [size * steps for size, steps in micro_batches]
        return max(sizes) - min(sizes), sum(steps for _, steps in micro_batches), sizes

    return min(
        (
            most_even_cut(tables.within(seconds * (1 + TIE)), problem.groups, samples)
            for seconds, samples in throughput.best()
        ),
        key=order,
    )
