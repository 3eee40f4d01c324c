# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The samples that ranks can finish within a given time with several micro-batches, and the least time for a total.

Within T seconds rank i can do k micro-batches of up to M_i(k) samples each. The ranks of a shard group have the same
k, so the group can do k * s samples for every s from its number of ranks to the sum of its M_i(k). These sets grow
with T, so the least T for a total is found by bisection over the floating-point numbers themselves: it ends at the
exact finish time of some micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accelerate_lshdp.planning.cuts.bisection import least_float
from accelerate_lshdp.planning.cuts.problem import Problem
from accelerate_lshdp.planning.cuts.subset_sums import GroupSums


@dataclass(frozen=True, slots=True)
class Choices:
    """The largest micro-batches of shard groups within some time, for each group and number of micro-batches.

    A choice is one group with one number of micro-batches.

    Args:
        count: the number of groups.
        group: the group of each choice, never decreasing.
        steps: its number of micro-batches, at least 1.
        first: where the choice's entries start in `largest`; a choice has one entry for each rank of the group.
        ranks: the number of ranks in the group of each choice.
        largest: the largest micro-batch of each rank of the group, at least 1.
    """

    count: int
    group: np.ndarray
    steps: np.ndarray
    first: np.ndarray
    ranks: np.ndarray
    largest: np.ndarray

    def sums(self, least: int = 1, greatest: int | None = None) -> GroupSums:
        """The totals that the groups can do if the batch of every rank is from `least` to `greatest` samples."""
        # Bounds of a batch become bounds of its micro-batch: rounded up below, down above.
        low, largest = -(-least // self.steps), self.largest
        if greatest is not None:
            largest = np.minimum(largest, np.repeat(greatest // self.steps, self.ranks))
        able = np.minimum.reduceat(largest, self.first) >= low
        high = np.add.reduceat(largest, self.first)
        return GroupSums(self.count, self.group[able], self.steps[able], (self.ranks * low)[able], high[able])

    def largest_batch(self) -> int:
        """The largest batch of any rank."""
        return int((self.largest * np.repeat(self.steps, self.ranks)).max())


class AccumulationTables:
    """The finish times of all ranks in flat arrays, from which `within` finds the choices of all groups at once.

    The arrays have one entry for each rank and micro-batch size.

    Args:
        problem: ranks and groups.
        most_steps: the largest number of micro-batches that each group may have.
    """

    def __init__(self, problem: Problem, most_steps: list[int]) -> None:
        groups = problem.groups
        largest = np.array(problem.largest)
        self._first = np.concatenate([time.first for time in problem.times])
        self._more = np.concatenate([time.more for time in problem.times])
        self._rank = np.repeat(np.arange(len(largest)), largest)
        self._single = np.cumsum(largest) - largest  # where each rank's entry for one sample is
        self._member = np.array([rank for group in groups for rank in group])
        self._size = np.array([len(group) for group in groups])
        self._member_start = np.cumsum(self._size) - self._size
        self._group = np.empty(len(largest), dtype=np.int64)
        self._group[self._member] = np.repeat(np.arange(len(groups)), self._size)
        self._most = np.array(most_steps)
        self.slowest_single = float(self._first[self._single].max())

    def within(self, seconds: float) -> Choices | None:
        """The choices of all groups within `seconds`; None if some group cannot finish one sample a rank."""
        most, start, largest = self._largest_within(seconds)
        if most.min() < 1:
            return None
        group = np.repeat(np.arange(len(most)), most)
        steps = np.arange(len(group)) - np.repeat(np.cumsum(most) - most, most) + 1
        # One choice after the other, and in each the ranks of its group.
        ranks = self._size[group]
        first = np.cumsum(ranks) - ranks
        place = np.arange(int(ranks.sum())) - np.repeat(first, ranks)
        member = self._member[np.repeat(self._member_start[group], ranks) + place]
        return Choices(len(most), group, steps, first, ranks, largest[start[member] + np.repeat(steps, ranks) - 1])

    def largest_micro_batches(self, seconds: float) -> list[list[int]]:
        """For each rank: its largest micro-batches within `seconds`, for 1, 2, ... micro-batches, as many as its whole
        group can do."""
        most, start, largest = self._largest_within(seconds)
        ends = start + most[self._group]
        return [largest[first:end].tolist() for first, end in zip(start.tolist(), ends.tolist(), strict=True)]

    def _largest_within(self, seconds: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The most micro-batches of each group; and, from a start for each rank, M_i(1), M_i(2), ... up to that."""
        steps = self._steps(seconds)
        most = np.minimum.reduceat(steps[self._single[self._member]], self._member_start)
        width = most[self._group]
        start = np.cumsum(width) - width
        # M_i(k) is the number of micro-batch sizes of which rank i can do at least k: count, then sum from above.
        # Capped at the group's number: what a rank could do beyond its group's slowest member is of no use.
        useful = np.minimum(steps, width[self._rank])
        able = useful > 0
        counts = np.bincount(start[self._rank[able]] + useful[able] - 1, minlength=int(width.sum()))
        above = np.append(np.cumsum(counts[::-1])[::-1], 0)
        return most, start, above[:-1] - np.repeat(above[start + width], width)

    def least_seconds(self, total: int) -> float:
        """The least seconds within which the groups can finish `total` samples; some finite time must be enough."""

        def is_full(seconds: float) -> bool:
            choices = self.within(seconds)
            return choices is not None and int(choices.sums().bounds()[1].sum()) >= total

        def is_enough(seconds: float) -> bool:
            choices = self.within(seconds)
            return choices is not None and choices.sums().reach(total)

        # First as if the sets had no holes, which is quick to test and a lower bound. Holes near the greatest total
        # are few, so the true optimum is close: the second search starts there in growing steps.
        enough = self.slowest_single
        below = math.nextafter(enough, 0.0)
        while not is_full(enough):
            below, enough = enough, 2 * enough
        filled = least_float(below, enough, is_full)
        below, enough, growth = math.nextafter(filled, 0.0), filled, 2.0**-30
        while not is_enough(enough):
            below, enough, growth = enough, filled * (1 + growth), 4 * growth
        return least_float(below, enough, is_enough)

    def _steps(self, seconds: float) -> np.ndarray:
        """The largest number of micro-batches of each size within `seconds`, computed as in `StepTimes.finish`."""
        most = self._most[self._group][self._rank]
        quotient = np.floor((seconds - self._first) / self._more)
        steps = np.clip(quotient + 1, 0, most).astype(np.int64)
        # The quotient is rounded and may be off by one. The comparisons below decide by the sum that the plan's own
        # time is computed with, so that bisection ends at a time that some cut really has.
        steps += (steps < most) & (self._first + steps * self._more <= seconds)
        steps -= (steps > 0) & (self._first + (steps - 1) * self._more > seconds)
        return steps
