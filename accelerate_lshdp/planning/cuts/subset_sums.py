# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Subset sums: the totals that several groups can reach if each takes one number out of a set of its own.

The sets are unions of arithmetic progressions: k micro-batches whose sizes sum to s give k * s samples, for each s
between two bounds. They have holes, and so have their sums, but only near the two ends. A total near the greatest one
is therefore tested from above, as the number of samples that the groups have to give up together; any other total is
tested from below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


# Stands for infinity in int64: above any sum of weights, and two of them can be added without overflow.
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
        """Whether the groups can take exactly `total` samples together."""
        slack = self.slack(total)
        return slack is not None and slack.is_reachable()

    def slack(self, total: int) -> Slack | None:
        """The distances from the nearer end that make up `total`; None if `total` lies outside of both ends."""
        bounds = self.bounds()
        if bounds is None:
            return None
        least, greatest = bounds
        above, below = total - int(least.sum()), int(greatest.sum()) - total
        if above < 0 or below < 0:
            return None
        # Time and memory grow with the distance, so the nearer end is taken.
        if above <= below:
            return Slack(self, least, 1, above)
        return Slack(self, greatest, -1, below)


class Slack:
    """A total as a sum of distances: each group goes some distance from one end of its set; they sum to `remaining`.

    Args:
        sums: the sets.
        origin: the end of each group's set from which it goes.
        sign: 1 if the groups go up from their least numbers, -1 if down from their greatest.
        remaining: the sum of all distances, in samples.

    Attributes:
        remaining: as given.
    """

    def __init__(self, sums: GroupSums, origin: np.ndarray, sign: int, remaining: int) -> None:
        self._sign, self.remaining, self._origin, self._count = sign, remaining, origin, sums.count
        # Distances above `remaining` cannot be part of the sum: choices are cut off there before they are listed.
        base = origin[sums.group]
        if sign > 0:
            first, last = sums.low, np.minimum(sums.high, (base + remaining) // sums.factor)
        else:
            first, last = np.maximum(sums.low, -((remaining - base) // sums.factor)), sums.high
        self._choice, sum_ = _ranges(first, last)
        self._group = sums.group[self._choice]
        self._distance = sign * (sums.factor[self._choice] * sum_ - base[self._choice])

    def distance(self, group: int, number: np.ndarray | int) -> np.ndarray | int:
        """The distance of a group from its end, in samples, when it takes `number` samples."""
        return self._sign * (number - int(self._origin[group]))

    def is_reachable(self) -> bool:
        """Whether some choice of distances, one a group, sums to `remaining`.

        Subset sums in the bits of one Python integer: bit d says whether the groups so far can go d samples together.
        """
        if self.remaining == 0:
            return True
        # A run of adjacent distances is one entry. The factor `remaining + 2` leaves a gap between the last distance
        # of a group and the first of the next one, so no run spans two groups.
        distances = np.unique(self._group * (self.remaining + 2) + self._distance)
        starts = np.flatnonzero(np.diff(distances, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(distances))
        groups, firsts = np.divmod(distances[starts], self.remaining + 2)
        mask = (1 << (self.remaining + 1)) - 1
        reached, current, before = 1, 0, 1
        for group, first, length in zip(groups.tolist(), firsts.tolist(), lengths.tolist(), strict=True):
            if group != current:
                # Each group can stay at its end, so nothing that was reached is lost.
                if reached >> self.remaining & 1:
                    return True
                current, before = group, reached
            # The mask drops sums beyond `remaining`, so the integer does not grow with the number of groups.
            reached |= _spread(before << first, length) & mask
        return bool(reached >> self.remaining & 1)

    def cheapest(self, weights: np.ndarray) -> list[np.ndarray]:
        """The least total weight of the groups from each one on, by the sum of their distances.

        Args:
            weights: one integer for each choice of the `GroupSums`.

        Returns:
            One array for each group g, and one beyond the last, for the groups g, g + 1, ...: int64, shape
            [remaining + 1], indexed by the sum of the distances; a huge number where no choice has that sum.
        """
        weight = weights[self._choice]
        # Of equal distances of a group only the lightest choice counts: it comes first in this order.
        order = np.lexsort((weight, self._distance, self._group))
        group, distance, weight = self._group[order], self._distance[order], weight[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = (np.diff(group) != 0) | (np.diff(distance) != 0)
        group, distance, weight = group[first], distance[first], weight[first]
        ends = np.searchsorted(group, np.arange(self._count + 1))
        after = np.full(self.remaining + 1, _UNREACHABLE)
        after[0] = 0
        result = [after]
        for index in range(self._count - 1, -1, -1):
            own = slice(ends[index], ends[index + 1])
            result.append(combine(result[-1], distance[own], weight[own]))
        return result[::-1]


def combine(weights: np.ndarray, distances: np.ndarray, added: np.ndarray) -> np.ndarray:
    """The least weight by sum of distances after one more group joins (a min-plus convolution).

    Args:
        weights: the least weight by sum of distances so far, int64.
        distances: the distances that the group can go, each below len(weights).
        added: the weight of each of these distances.
    """
    result = np.full_like(weights, _UNREACHABLE)
    for distance, weight in zip(distances.tolist(), added.tolist(), strict=True):
        joined = weights[: len(weights) - distance] + weight
        np.minimum(result[distance:], joined, out=result[distance:])
    return result


def _ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of the range, and the integer, for every integer of the ranges first[i] to last[i]."""
    lengths = np.maximum(last - first + 1, 0)
    index = np.repeat(np.arange(len(first)), lengths)
    before = np.cumsum(lengths) - lengths
    return index, first[index] + np.arange(len(index)) - before[index]


def _spread(bits: int, length: int) -> int:
    """The union of `bits` shifted by 0, 1, ... length - 1, in log2(length) shifts by doubling."""
    done = 1
    while done < length:
        step = min(done, length - done)
        bits |= bits << step
        done += step
    return bits
