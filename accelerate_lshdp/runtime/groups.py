# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The process groups of a world, each made once and by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist


def world_timeout() -> timedelta:
    """The time-out of collectives that the group of all ranks was made with."""
    # torch has no public way to read it. By the first device type, as a group may have a backend for each.
    world = dist.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Makes a group with the time-out of the group of all ranks (collective over the world, members or not).

    torch would give it its own default, half an hour with gloo, whatever the user asked for.

    Args:
        ranks: its members; None: all.
        backend: None: that of the group of all ranks.
    """
    members = None if ranks is None else list(ranks)
    return dist.new_group(members, timeout=world_timeout(), backend=backend)


def host_backend() -> str | None:
    """The backend of groups that carry tensors in host memory; None: that of the group of all ranks does."""
    backends = dist.get_backend_config()  # such as "gloo", "nccl" or "cpu:gloo,cuda:nccl"
    return None if "cpu:" in backends or backends == dist.Backend.GLOO else "gloo"


#: Types of devices whose tensors gloo takes; it copies those of CUDA to the host itself.
_DEVICES_OF_GLOO = ("cpu", "cuda")


def is_gloo(backend: str) -> bool:
    """Whether a backend is gloo alone: one for all devices, or one for each of them (``"cpu:gloo,cuda:gloo"``)."""
    return {each.rpartition(":")[2] for each in backend.split(",")} == {dist.Backend.GLOO}


def meets_on_hosts() -> bool:
    """Whether the group of all ranks is over gloo alone, so that ranks with devices may be beside ranks without."""
    return is_gloo(dist.get_backend_config())


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of it in host memory if all ranks meet there and gloo does not know its device."""
    return tensor.cpu() if meets_on_hosts() and tensor.device.type not in _DEVICES_OF_GLOO else tensor


@contextmanager
def temporary_group(partition: Sequence[Sequence[int]]) -> Iterator[dist.ProcessGroup]:
    """Makes a group for the time of a block (collective over the world to enter and to leave).

    Args:
        partition: disjoint groups of ranks that cover the world.

    Yields:
        The one in which this rank is.
    """
    # All ranks make all groups, their own or not: torch numbers groups by how many were made, on each rank for itself.
    made = [new_group(ranks) for ranks in partition]
    own = next(group for ranks, group in zip(partition, made, strict=True) if dist.get_rank() in ranks)
    yield own
    # Not after an error: other ranks may be in the middle of something. Nor before all are done: it cuts connections.
    dist.barrier()
    dist.destroy_process_group(own)


#: Number of the model, user, ranks, backend.
_Key = tuple[int, str, tuple[int, ...], str | None]


class ProcessGroups:
    """Makes and keeps process groups by their ranks, for everything that trains in the same world.

    Creating a group is collective over the world, so every rank asks for all groups of a partition, its own or not.
    A group costs time even when nobody uses it: gloo has a thread for each, which wakes up a hundred times a second.
    So trainings of one process share them. One that was given up in the middle of a backward may have left messages
    there that some rank never answers; before anything else is trained, all ranks then have to `forget`.

    Models of one loss do not share them: a rank may have gradients of one before those of the other, or leave one out.

    Attributes:
        model: counts from 0 the models of a training, whose groups are asked for.
    """

    _made_in: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.model = 0

    def of_partition(self, partition: Sequence[Sequence[int]], rank: int, user: str = "") -> dist.ProcessGroup:
        """The group of ``partition`` (disjoint groups that cover the world) in which ``rank`` is (collective).

        Args:
            partition: groups of ranks.
            rank: this process's rank.
            user: names who starts collectives of the group. Two that start them independently of each other, as a
                thread and autograd do, need groups of their own: those of a group are matched by their order.
        """
        # Without a look at whose group it is: a rank that made only its own would count fewer groups than the others.
        mine = None
        for ranks in partition:
            group = self._group(tuple(ranks), user)
            if rank in ranks:
                mine = group
        if mine is None:
            raise ValueError(f"rank {rank} is in none of the groups {[list(ranks) for ranks in partition]}")
        return mine

    @classmethod
    def forget(cls) -> None:
        """Forgets all groups of this world, so that they are made anew (to be called by all ranks)."""
        # Not destroyed: a thread of gloo may still be in one of them, and closing connections would fail other ranks.
        cls._made_in.pop(dist.group.WORLD, None)

    def of_ranks(self, ranks: tuple[int, ...], user: str = "") -> dist.ProcessGroup:
        """The group of some ranks (collective over the world, members or not); ``user`` as for `of_partition`."""
        return self._group(ranks, user)

    def on_host(self, ranks: tuple[int, ...], user: str = "") -> dist.ProcessGroup:
        """As `of_ranks`, for tensors in host memory, whatever device the ranks train on."""
        return self._group(ranks, user, host_backend())

    def _group(self, ranks: tuple[int, ...], user: str, backend: str | None = None) -> dist.ProcessGroup:
        # The world's own group needs no second one, whose threads would cost time; further models need their own.
        if self.model == 0 and not user and backend is None and ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        made = self._made_in.setdefault(dist.group.WORLD, {})
        key = (self.model, user, ranks, backend)
        if key not in made:
            made[key] = new_group(ranks, backend)
        return made[key]
