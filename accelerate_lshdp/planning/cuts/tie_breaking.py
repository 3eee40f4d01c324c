# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Of all cuts of a total that finish in time, the one to take when ranks may accumulate.

The smallest difference between the largest and the smallest batch; then the fewest micro-batches in total; then the
lexicographically smallest batch sizes. That leaves one cut: of two numbers of micro-batches for the same batches of a
group, one is fewer.
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
        choices: what the groups can do in time; `total` must be among it.
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
    sums = choices.sums(least, greatest)
    slack = sums.slack(total)
    group_sizes = np.array([len(group) for group in groups])
    later = slack.cheapest(group_sizes[sums.group] * sums.factor)
    room, left = slack.room, int(later[0][slack.room])
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
                others = combine(others, *group.ways_left(room))
        group = begun[index]
        sizes[rank] = group.serve_next(others, room, left)
        if group.is_complete:
            room -= int(group.way(group.taken))
            count = (left - int(others[room])) // len(groups[index])
            left = int(others[room])
            for member in groups[index]:
                steps[member] = count
            del begun[index]
    return fewest, sizes, steps


class _BegunGroup:
    """A shard group of which some ranks have been given their batches, and the numbers of micro-batches that it may
    still have.

    Attributes:
        taken: samples of the ranks that have been served.
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

    def way(self, number: np.ndarray | int) -> np.ndarray | int:
        """How far the group is from its end with `number` samples."""
        return self._slack.way(self._index, number)

    def ways_left(self, room: int) -> tuple[np.ndarray, np.ndarray]:
        """How far the group can still be from its end when it is complete, and the micro-batches that this takes."""
        ways, weights = [], []
        for option in range(len(self._steps)):
            way = self.way(self._numbers(option))
            way = way[(way >= 0) & (way <= room)]
            ways.append(way)
            weights.append(np.full(len(way), self._ranks * self._steps[option]))
        return np.concatenate(ways), np.concatenate(weights)

    def serve_next(self, others: np.ndarray, room: int, left: int) -> int:
        """Gives the next rank its batch: the smallest with which `left` micro-batches can make up `room`.

        Args:
            others: the fewest micro-batches by the way that all other groups go.
            room: what the ways of all groups have to sum to.
            left: the micro-batches of all groups.
        """
        rest = self._high[:, self._served + 1 :].sum(axis=1)
        batches = []
        for option, step in enumerate(self._steps.tolist()):
            numbers = self._numbers(option)
            way = self.way(numbers)
            inside = (way >= 0) & (way <= room)
            fits = others[room - way[inside]] + self._ranks * step == left
            if fits.any():
                # The smaller the group's number, the smaller can this rank's part of it be.
                smallest = (int(numbers[inside][fits][0]) - self.taken) // step - int(rest[option])
                batches.append(step * max(int(self._low[option]), smallest))
        batch = min(batches)
        size = batch // self._steps
        high = self._high[:, self._served]
        self._keep((size * self._steps == batch) & (size >= self._low) & (size <= high))
        self._served += 1
        self.taken += batch
        return batch

    def _numbers(self, option: int) -> np.ndarray:
        """The samples that the group can have when it is complete, with this number of micro-batches."""
        open_ranks = self._ranks - self._served
        low, high = open_ranks * self._low[option], self._high[option, self._served :].sum()
        return self.taken + self._steps[option] * np.arange(low, high + 1)

    def _keep(self, options: np.ndarray) -> None:
        self._steps, self._low, self._high = self._steps[options], self._low[options], self._high[options]
