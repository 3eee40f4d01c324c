"""The process groups of a run, each made once and by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class ProcessGroups:
    """Makes and keeps process groups by their ranks.

    Creating a group is collective over the world, so every rank asks for all groups of a partition, its own or not.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}

    def of_partition(
        self, partition: Sequence[Sequence[int]], rank: int, *, backend: str | None = None
    ) -> dist.ProcessGroup:
        """The group of ``partition`` (disjoint groups that cover the world) in which ``rank`` is (collective).

        Args:
            partition: groups of ranks.
            rank: this process's rank.
            backend: ``"gloo"`` for host tensors; None: that of the world.
        """
        mine = None
        for ranks in partition:
            group = self._group(tuple(ranks), backend)
            if rank in ranks:
                mine = group
        if mine is None:
            raise ValueError(f"rank {rank} is in none of the groups {[list(ranks) for ranks in partition]}")
        return mine

    def _group(self, ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup:
        if ranks == tuple(range(dist.get_world_size())) and backend in (None, dist.get_backend()):
            return dist.group.WORLD
        key = (ranks, backend)
        if key not in self._made:
            self._made[key] = dist.new_group(list(ranks), backend=backend)
        return self._made[key]
