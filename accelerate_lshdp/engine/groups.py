"""The process groups of a run, each made once and by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def world_timeout() -> timedelta:
    """How long a collective waits for a rank: as the group of all ranks was told when it was made."""
    world = dist.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """A group that waits as long as that of all ranks (collective over the world, members or not).

    torch would give it its own default, half an hour with gloo, whatever the user asked for.

    Args:
        ranks: its members; None: all.
        backend: None: that of the group of all ranks.
    """
    members = None if ranks is None else list(ranks)
    return dist.new_group(members, timeout=world_timeout(), backend=backend)


class ProcessGroups:
    """Makes and keeps process groups by their ranks.

    Creating a group is collective over the world, so every rank asks for all groups of a partition, its own or not.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of_partition(self, partition: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup:
        """The group of ``partition`` (disjoint groups that cover the world) in which ``rank`` is (collective).

        Args:
            partition: groups of ranks.
            rank: this process's rank.
        """
        mine = None
        for ranks in partition:
            group = self._group(tuple(ranks))
            if rank in ranks:
                mine = group
        if mine is None:
            raise ValueError(f"rank {rank} is in none of the groups {[list(ranks) for ranks in partition]}")
        return mine

    def of_ranks(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of some ranks (collective over the world, members or not)."""
        return self._group(ranks)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        if ranks not in self._made:
            self._made[ranks] = new_group(ranks)
        return self._made[ranks]
