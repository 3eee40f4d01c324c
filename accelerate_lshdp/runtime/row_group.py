# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`RowGroup`: ranks that send each other rows of numbers in host memory, without waiting for a device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.dissemination import Dissemination, Gathering
from accelerate_lshdp.runtime.groups import new_group


#: Up to so many ranks each one sends to all others at once, which takes one round. With more, messages are counted.
DIRECT_RANKS = 8


class RowGroup:
    """A group over gloo (collective over the world to make, members or not).

    Args:
        ranks: its members; None: all.
        shares_world: that a few ranks may take the group of all ranks, whose collectives are called in the same order.

    Attributes:
        ranks: its members.
    """

    def __init__(self, ranks: Sequence[int] | None = None, *, shares_world: bool = False) -> None:
        self.ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
        is_direct = len(self.ranks) <= DIRECT_RANKS
        takes_world = shares_world and is_direct and dist.get_backend() == "gloo"
        self._group = dist.group.WORLD if takes_world else new_group(ranks, backend="gloo")
        is_member = dist.get_rank() in self.ranks
        self._dissemination = None if is_direct or not is_member else Dissemination(self._group)

    def gather(self, row: torch.Tensor) -> tuple[dist.Work | Gathering, torch.Tensor]:
        """Begins to gather a row of each member, as long on all; does not wait (collective).

        Args:
            row: of this rank, one dimension, in host memory. It may be changed at once.

        Returns:
            What to wait with, and the rows once that has been done, shape (ranks, row), in the order of ranks.
        """
        if self._dissemination is not None:
            return self._dissemination.gather(row)
        # Every rank sends to every other one at once. A ring, as gloo's all-gather is, would pass W - 1 messages one
        # after the other, and each of them wakes a thread that may have to wait for a processor.
        sent = row.repeat(len(self.ranks))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        return work, received.view(len(self.ranks), -1)

    def unite(self, bits: torch.Tensor) -> torch.Tensor:
        """The bits that any member has set, which costs fewer bytes than to gather all rows; waits (collective).

        Args:
            bits: of this rank, uint8, as many on all, in host memory.
        """
        if self._dissemination is not None:
            work, united = self._dissemination.unite(bits)
            work.wait()
            return united
        # Each member unites one part for all.
        size = len(self.ranks)
        parts = bits.new_zeros(size, -(-len(bits) // size))
        parts.view(-1)[: len(bits)] = bits
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        work, parts = self.gather(functools.reduce(torch.bitwise_or, received))
        work.wait()
        return parts.reshape(-1)[: len(bits)]
