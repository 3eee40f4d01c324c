# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Micro-batches that are worth placing a model for: one size a rank, and how often a step has them.

Without limits of memory the best sizes are those of `planning.cuts`: within some time every rank takes as many samples
as it can. With them a rank of little memory takes fewer, and how many fit depends on the placement. So both are tried:
cuts of every total up to the most that fits any placement, with ranks that are full left at what they can take; the
same number on all ranks; what uniform placements have room for; and, from the best of these, steps away from them
(`neighbours`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np

from accelerate_lshdp.planning.cuts.batch_sizes import plan_fixed_total
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.inputs import PlacementCluster


#: Totals that are cut: so many, one step apart, then in steps that grow with the total.
_DENSE, _GROWTH = 32, 1 / 32


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: micro-batches of `sizes` samples, one size a rank, `steps` times.

    Sorts by total, so that of equal throughput the smallest is taken.
    """

    sizes: tuple[int, ...]
    steps: int = 1

    @property
    def total(self) -> int:
        """Samples in the global batch."""
        return self.steps * sum(self.sizes)


class Batches:
    """The batches that are tried on a cluster.

    Args:
        cluster: its ranks.
        most: the largest micro-batch of each rank that any placement has room for.
        full: largest micro-batches of all ranks at the same time, of some placements.
        total: samples that the global batch has to have. None: any number.
        most_steps: the most micro-batches of a step.
    """

    def __init__(
        self,
        cluster: PlacementCluster,
        most: Sequence[int],
        full: Sequence[Sequence[int]],
        total: int | None,
        most_steps: int,
    ) -> None:
        self.cluster, self.most, self.total, self.most_steps = cluster, tuple(most), total, most_steps
        self.full = sorted({tuple(map(min, own, self.most)) for own in full})
        limits = zip(cluster.profiles, cluster.node_sizes_of_ranks, cluster.memory_limits, strict=True)
        #: Ranks between which nothing differs.
        groups: dict[tuple[object, ...], list[int]] = {}
        for rank, (profile, size, limit) in enumerate(limits):
            groups.setdefault((profile.time, profile.fixed_seconds, size, limit, self.most[rank]), []).append(rank)
        self.groups = list(groups.values())

    def first(self) -> Iterator[Batch]:
        """The batches to begin with, each once."""
        seen = set()
        for batch in self._first():
            if batch not in seen:
                seen.add(batch)
                yield batch

    def _first(self) -> Iterator[Batch]:
        world = self.cluster.world
        if self.total is not None:
            for steps in range(1, self.most_steps + 1):
                each = self.total // steps
                if self.total % steps or not world <= each <= sum(self.most):
                    continue
                for most in (self.most, *self.full):
                    if each <= sum(most):
                        yield Batch(self._cut(each, most), steps)
                if each % world == 0 and each // world <= min(self.most):
                    yield Batch((each // world,) * world, steps)
            return
        for steps in range(1, self.most_steps + 1):
            for size in self._spread(1, min(self.most)):
                yield Batch((size,) * world, steps)
            # Groups of equal ranks have equal numbers of samples; so totals are tried by what one of them takes,
            # and not more than four times as often as by what all of them take.
            if len(self.groups) > 1:
                for total in self._spread(world, sum(self.most), max(-(-world // 4), min(map(len, self.groups)))):
                    yield Batch(self._level(self._cut(total, self.most)), steps)
            for most in self.full:
                yield Batch(most, steps)
                yield Batch((min(most),) * world, steps)
                for group in self.groups if len(self.groups) > 1 else ():
                    yield Batch(self._within(self._time(group[0], most[group[0]]), most), steps)

    def neighbours(self, batch: Batch) -> Iterator[Batch]:
        """Batches that differ a little: other sizes for one or two groups of equal ranks; with a fixed total, samples
        of one group given to another."""
        if self.total is None:
            for group in self.groups:
                for change in (-8, -4, -2, -1, 1, 2, 4, 8):
                    yield from self._changed(batch, dict.fromkeys(group, change))
            for one, other in permutations(self.groups, 2):
                for more, less in ((1, 1), (1, 2), (2, 1), (4, 1), (1, 4)):
                    yield from self._changed(batch, dict.fromkeys(one, more) | dict.fromkeys(other, -less))
            for one, other in combinations(self.groups, 2):
                for change in (-1, 1):
                    yield from self._changed(batch, dict.fromkeys((*one, *other), change))
            return
        for giving, taking in permutations(self.groups, 2):
            for count in (1, 2, min(len(giving), len(taking)), max(len(giving), len(taking))):
                yield from self._changed(batch, self._moved(giving, -count) | self._moved(taking, count))

    def _moved(self, group: Sequence[int], count: int) -> dict[int, int]:
        """Changes of the ranks of a group that sum to `count`, spread over them."""
        each, rest = divmod(abs(count), len(group))
        sign = 1 if count > 0 else -1
        return {rank: sign * (each + (place < rest)) for place, rank in enumerate(group)}

    def _changed(self, batch: Batch, changes: dict[int, int]) -> Iterator[Batch]:
        sizes = tuple(size + changes.get(rank, 0) for rank, size in enumerate(batch.sizes))
        if all(1 <= size <= most for size, most in zip(sizes, self.most, strict=True)):
            yield replace(batch, sizes=sizes)

    def _time(self, rank: int, size: int) -> float:
        return self.cluster.profiles[rank].time(size)

    def _within(self, seconds: float, most: Sequence[int]) -> tuple[int, ...]:
        """The largest micro-batches, up to `most`, that each rank computes within some time; at least one sample."""
        return tuple(
            max(1, int(np.searchsorted(profile.time.table(largest), seconds, side="right")))
            for profile, largest in zip(self.cluster.profiles, most, strict=True)
        )

    def _cut(self, total: int, most: Sequence[int]) -> tuple[int, ...]:
        """The cut of a total with which the slowest rank computes least, with at most so many samples a rank."""
        profiles = [
            replace(profile, max_micro_batch_size=largest, memory_limit_bytes=None, memory=None, bucket_ready=None)
            for profile, largest in zip(self.cluster.profiles, most, strict=True)
        ]
        return tuple(plan_fixed_total(profiles, total).batch_sizes)

    def _level(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The least size of each group's ranks, for all of them."""
        level = list(sizes)
        for group in self.groups:
            least = min(sizes[rank] for rank in group)
            for rank in group:
                level[rank] = least
        return tuple(level)

    @staticmethod
    def _spread(first: int, last: int, step: int = 1) -> Iterator[int]:
        value = first
        while value <= last:
            yield value
            value += step * max(1, int((value // step - _DENSE) * _GROWTH) + 1 if value // step > _DENSE else 1)


def require_total(batches: Batches) -> None:
    """Checks that a fixed total can be cut.

    Raises:
        PlanningError: it cannot; it names the nearest total that can.
    """
    total, world, most = batches.total, batches.cluster.world, sum(batches.most)
    if total is None or any(True for _ in batches.first()):
        return

    multiples = (
        steps * min(max(each, world), most)
        for steps in range(1, batches.most_steps + 1)
        for each in (total // steps, total // steps + 1)
    )
    nearest = min(multiples, key=lambda value: (abs(value - total), value))
    raise PlanningError(
        f"found a global batch of {total} samples, expected one that {world} ranks can take in up to"
        f" {batches.most_steps} equal micro-batches of at most {most} samples together, as much as their memory"
        f" and their measured times allow: the nearest is {nearest}"
    )
