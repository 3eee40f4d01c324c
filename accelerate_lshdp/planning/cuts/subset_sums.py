# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which totals can several groups reach, if each takes one number out of a set of its own?

The sets are unions of arithmetic progressions: k micro-batches whose sizes sum to s give k * s samples, for each s
between two bounds. They have holes, and so have their sums, but only near the two ends. A total near the greatest one
is therefore asked for from above, as how much the groups have to give up together, any other one from below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


# More than any sum of weights, and so little that two of them can be added.
_UNREACHABLE = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupSums:
    """The sets: group[o] can take factor[o] * s for each s from low[o] to high[o]. Integer arrays, one entry a choice.

    Args:
        count: the number of groups, all of which must take something.
        group: the group of each choice, never decreasing.
        factor: k of each choice.
        low: least s, at least 1.
        high: greatest s, at least `low`.
    """

    count: int
    group: np.ndarray
    factor: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The least and the greatest number of each group, None if a group has no choice."""
        starts = np.flatnonzero(np.diff(self.group, prepend=-1))
        if len(starts) < self.count:
            return None
        least = np.minimum.reduceat(self.factor * self.low, starts)
        return least, np.maximum.reduceat(self.factor * self.high, starts)

    def reach(self, total: int) -> bool:
        """Whether the groups can take `total` together."""
        slack = self.slack(total)
        return slack is not None and slack.is_reachable()

    def slack(self, total: int) -> Slack | None:
        """The question for `total`, seen from the nearer end; None if it lies outside of both ends."""
        bounds = self.bounds()
        if bounds is None:
            return None
        least, greatest = bounds
        above, below = total - int(least.sum()), int(greatest.sum()) - total
        if above < 0 or below < 0:
            return None
        if above <= below:
            return Slack(self, least, 1, above)
        return Slack(self, greatest, -1, below)


class Slack:
    """How a total is made up: each group goes some way from one end of its set, and the ways sum to `room`.

    Args:
        sums: the sets.
        origin: the end of each group's set from which it goes.
        sign: 1 if the groups go up from their least numbers, -1 if down from their greatest.
        room: what the ways have to sum to.

    Attributes:
        room: as given.
    """

    def __init__(self, sums: GroupSums, origin: np.ndarray, sign: int, room: int) -> None:
        self._sign, self.room, self._origin, self._count = sign, room, origin, sums.count
        base = origin[sums.group]
        if sign > 0:
            first, last = sums.low, np.minimum(sums.high, (base + room) // sums.factor)
        else:
            first, last = np.maximum(sums.low, -((room - base) // sums.factor)), sums.high
        self._choice, sum_ = _ranges(first, last)
        self._group = sums.group[self._choice]
        self._way = sign * (sums.factor[self._choice] * sum_ - base[self._choice])

    def way(self, group: int, number: np.ndarray | int) -> np.ndarray | int:
        """How far from its end a group is with these numbers."""
        return self._sign * (number - int(self._origin[group]))

    def is_reachable(self) -> bool:
        """Whether some choice of ways sums to `room`. Bit w of an integer says whether the groups so far can go w."""
        if self.room == 0:
            return True
        # A run of adjacent ways is one entry; `room + 2` keeps the last way of a group and the first of the next
        # apart.
        ways = np.unique(self._group * (self.room + 2) + self._way)
        starts = np.flatnonzero(np.diff(ways, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(ways))
        groups, firsts = np.divmod(ways[starts], self.room + 2)
        mask = (1 << (self.room + 1)) - 1
        reached, current, before = 1, 0, 1
        for group, first, length in zip(groups.tolist(), firsts.tolist(), lengths.tolist(), strict=True):
            if group != current:
                # Each group can stay at its end, so nothing that was reached is lost.
                if reached >> self.room & 1:
                    return True
                current, before = group, reached
            reached |= _spread(before << first, length) & mask
        return bool(reached >> self.room & 1)

    def cheapest(self, weights: np.ndarray) -> list[np.ndarray]:
        """The least total weight by the sum of the ways, for the groups from each one on.

        Args:
            weights: of each choice of the `GroupSums`.

        Returns:
            For each group g, and one beyond the last, that of the groups g, g + 1, ...: int64, shape [room + 1], a
            huge number where no choice leads.
        """
        weight = weights[self._choice]
        order = np.lexsort((weight, self._way, self._group))
        group, way, weight = self._group[order], self._way[order], weight[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = (np.diff(group) != 0) | (np.diff(way) != 0)
        group, way, weight = group[first], way[first], weight[first]
        ends = np.searchsorted(group, np.arange(self._count + 1))
        after = np.full(self.room + 1, _UNREACHABLE)
        after[0] = 0
        result = [after]
        for index in range(self._count - 1, -1, -1):
            own = slice(ends[index], ends[index + 1])
            result.append(combine(result[-1], way[own], weight[own]))
        return result[::-1]


def combine(weights: np.ndarray, ways: np.ndarray, added: np.ndarray) -> np.ndarray:
    """The least weight by way when a group with these ways (0 to len(weights) - 1) and weights joins."""
    result = np.full_like(weights, _UNREACHABLE)
    for way, weight in zip(ways.tolist(), added.tolist(), strict=True):
        joined = weights[: len(weights) - way] + weight
        np.minimum(result[way:], joined, out=result[way:])
    return result


def _ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every integer of each range, and the index of its range."""
    lengths = np.maximum(last - first + 1, 0)
    index = np.repeat(np.arange(len(first)), lengths)
    before = np.cumsum(lengths) - lengths
    return index, first[index] + np.arange(len(index)) - before[index]


def _spread(bits: int, length: int) -> int:
    """The union of `bits` shifted by 0, 1, ... length - 1."""
    done = 1
    while done < length:
        step = min(done, length - done)
        bits |= bits << step
        done += step
    return bits
