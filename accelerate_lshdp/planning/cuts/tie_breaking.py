# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tie rules among cuts of a total that finish in time, when ranks may accumulate.

The smallest difference between the largest and the smallest batch; then the fewest micro-batches in total; then the
lexicographically smallest batch sizes. Exactly one cut is left: batch sizes that are
equal in two cuts leave a group's number of micro-batches, of which the second rule takes the smaller one.
"""

from __future__ import annotations

import numpy as np

from accelerate_lshdp.planning.cuts.accumulation import Choices
from accelerate_lshdp.planning.cuts.bisection import least_integer
from accelerate_lshdp.planning.cuts.subset_sums import Slack, combine


# (total number of micro-batches, batch sizes, numbers of micro-batches): what cuts are compared by.
_Cut = tuple[int, list[int], list[int]]


def most_even_cut(choices: Choices, groups: list[list[int]], total: int) -> list[tuple[int, int]]:
    """(micro-batch size, accumulation steps) of each rank, in rank order.

    Args:
        choices: the micro-batches that the groups can finish in time; `total` must be one of their sums.
        groups: the ranks of each group, sorted, groups in the order of their first ranks.
        total: samples in the global batch.
    """
    width, starts = _narrowest_windows(choices, sum(map(len, groups)), total)
    _, sizes, steps = min(_first_cut(choices, groups, total, least, least + width) for least in starts)
    return [(size // count, count) for size, count in zip(sizes, steps, strict=True)]


def _narrowest_windows(choices: Choices, ranks: int, total: int) -> tuple[int, list[int]]:
    """The least width w for which all batches fit into some [L, L + w], and every such L.

    A window that is widened stays wide enough. So the greatest L for an upper end H grows with H, and two pointers
    meet all narrowest windows.
    """

    def fits(least: int, greatest: int) -> bool:
        return choices.sums(least, greatest).reach(total)

    # The window that ends lowest has greatest end H0 = `greatest`; the one that begins highest begins at `most`.
    # Between them two pointers move up only. The negated arguments search for a greatest number.
    largest = choices.largest_batch()
    greatest = least_integer(-(-total // ranks) - 1, largest, lambda value: fits(1, value))
    most = -least_integer(-(total // ranks) - 1, -1, lambda value: fits(-value, largest))
    least = -least_integer(-most - 1, -1, lambda value: fits(-value, greatest))
    width, starts = greatest - least, [least]
    while greatest + 1 - most <= width:
        greatest += 1
        while least < most and fits(least + 1, greatest):
            least += 1
        if greatest - least < width:
            width, starts = greatest - least, [least]
        elif greatest - least == width:
            starts.append(least)
    return width, starts


def _first_cut(choices: Choices, groups: list[list[int]], total: int, least: int, greatest: int) -> _Cut:
    """The cut with the fewest micro-batches, then the lexicographically smallest, with batches in [least, greatest].

    Ranks are served in order. Each takes the smallest batch with which the total can still be completed in the fewest
    micro-batches: by the rest of its group, by other groups that have begun (where groups are not runs of ranks), and
    by the groups after them, whose possibilities are known for all sums beforehand.
    """
    # Dynamic programming over groups from the last to the first; then ranks are served from the first to the last with
    # the tables that say whether the rest can still be completed in the fewest micro-batches.
    sums = choices.sums(least, greatest)
    slack = sums.slack(total)
    group_sizes = np.array([len(group) for group in groups])
    later = slack.cheapest(group_sizes[sums.group] * sums.factor)
    remaining, left = slack.remaining, int(later[0][slack.remaining])
    fewest = left

    begun: dict[int, _BegunGroup] = {}
    number_begun = 0
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    sizes, steps = [0] * len(group_of), [0] * len(group_of)
    for rank in range(len(group_of)):
        index = group_of[rank]
        if index not in begun:
            begun[index] = _BegunGroup(choices, index, slack, least, greatest)
            number_begun += 1
        others = later[number_begun]
        for other, group in begun.items():
            if other != index:
                others = combine(others, *group.possible_distances(remaining))
        group = begun[index]
        sizes[rank] = group.serve_next(others, remaining, left)
        if group.is_complete:
            remaining -= int(group.distance(group.taken))
            # The micro-batches that the group takes of those that are left, divided by its ranks.
            count = (left - int(others[remaining])) // len(groups[index])
            left = int(others[remaining])
            for member in groups[index]:
                steps[member] = count
            del begun[index]
    return fewest, sizes, steps


class _BegunGroup:
    """A shard group of which some ranks have their batches, with the numbers of micro-batches that are still possible.

    Attributes:
        taken: samples of the ranks that have their batches.
    """

    def __init__(self, choices: Choices, index: int, slack: Slack, least: int, greatest: int) -> None:
        own = slice(*np.searchsorted(choices.group, [index, index + 1]))
        self._steps = choices.steps[own]
        self._ranks = int(choices.ranks[own][0])
        entries = choices.largest[choices.first[own][0] :][: len(self._steps) * self._ranks]
        self._low = -(-least // self._steps)
        self._high = np.minimum(entries.reshape(-1, self._ranks), (greatest // self._steps)[:, None])
        self._keep((self._high >= self._low[:, None]).all(axis=1))
        self._served, self.taken = 0, 0
        self._slack, self._index = slack, index

    @property
    def is_complete(self) -> bool:
        return self._served == self._ranks

    def distance(self, number: np.ndarray | int) -> np.ndarray | int:
        """The distance of the group from its end (see `Slack`) with `number` samples."""
        return self._slack.distance(self._index, number)

    def possible_distances(self, remaining: int) -> tuple[np.ndarray, np.ndarray]:
        """The distances up to `remaining` that the complete group can have, and the micro-batches of each one."""
        distances, weights = [], []
        for option in range(len(self._steps)):
            distance = self.distance(self._numbers(option))
            distance = distance[(distance >= 0) & (distance <= remaining)]
            distances.append(distance)
            weights.append(np.full(len(distance), self._ranks * self._steps[option]))
        return np.concatenate(distances), np.concatenate(weights)

    def serve_next(self, others: np.ndarray, remaining: int, left: int) -> int:
        """Gives the next rank its batch: the smallest with which `left` micro-batches can make up `remaining`.

        Args:
            others: the fewest micro-batches of all other groups, by the sum of their distances.
            remaining: the sum of the distances of all groups.
            left: the number of micro-batches of all groups.
        """
        rest = self._high[:, self._served + 1 :].sum(axis=1)
        batches = []
        for option, step in enumerate(self._steps.tolist()):
            numbers = self._numbers(option)
            distance = self.distance(numbers)
            inside = (distance >= 0) & (distance <= remaining)
            fits = others[remaining - distance[inside]] + self._ranks * step == left
            if fits.any():
                # Numbers ascend, and the ranks after this one take at most `rest`: the smallest number that fits gives
                # the smallest batch of this rank.
                smallest = (int(numbers[inside][fits][0]) - self.taken) // step - int(rest[option])
                batches.append(step * max(int(self._low[option]), smallest))
        # Other numbers of micro-batches that give the rank the same batch stay possible.
        batch = min(batches)
        size = batch // self._steps
        high = self._high[:, self._served]
        self._keep((size * self._steps == batch) & (size >= self._low) & (size <= high))
        self._served += 1
        self.taken += batch
        return batch

    def _numbers(self, option: int) -> np.ndarray:
        """The totals in samples that the complete group can have with the number of micro-batches of this option."""
        open_ranks = self._ranks - self._served
        low, high = open_ranks * self._low[option], self._high[option, self._served :].sum()
        return self.taken + self._steps[option] * np.arange(low, high + 1)

    def _keep(self, options: np.ndarray) -> None:
        self._steps, self._low, self._high = self._steps[options], self._low[options], self._high[options]
