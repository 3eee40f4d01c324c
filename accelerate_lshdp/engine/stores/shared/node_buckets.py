# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The buckets of a node: where gradients lie in its memory, which rank owns each, and what sums it between nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from accelerate_lshdp.engine.stores.shared.bucket import SharedBucket
from accelerate_lshdp.engine.stores.shared.memory import Layout, NodeMemory
from accelerate_lshdp.engine.stores.shared.table import NodeTable
from accelerate_lshdp.engine.wire.buckets import owners
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.runtime.topology import Topology


class NodeBuckets:
    """The buckets of gradients that the ranks of each node sum, laid out alike on all ranks.

    Args:
        topology: nodes and ranks; nodes may have different numbers of ranks.
        members: of each bucket, the parameters, or parts of them, whose gradients lie in it one after the other.
        layout: gets places for the buckets and for the table of the node.
        numbers: how many numbers the ranks of the node exchange at once.
        parts: of the model that are stepped one after the other.
        owned_with: see `BucketLayout`.
        again: likewise.

    Attributes:
        table: of the node's progress; `map` maps it.
        places: of the buckets in the memory, in bytes.
    """

    def __init__(
        self,
        topology: Topology,
        members: Sequence[Sequence[torch.Tensor]],
        layout: Layout,
        *,
        numbers: int = 0,
        parts: int = 0,
        owned_with: Mapping[int, int] | None = None,
        again: Mapping[int, int] | None = None,
    ) -> None:
        self._topology = topology
        self._members = members
        self._owned_with = dict(owned_with or {})
        self._again = dict(again or {})
        self._sizes = [sum(p.numel() * p.dtype.itemsize for p in bucket) for bucket in members]
        self.places: list[int] = []
        for number, size in enumerate(self._sizes):
            earlier = self._again.get(number)
            self.places.append(layout.place(size) if earlier is None else self.places[earlier])
        self.table = NodeTable(len(topology.node_groups[topology.node]), len(members), numbers, layout, parts)

    def map(
        self,
        memory: NodeMemory,
        reduction_of: Callable[[tuple[int, ...]], GradientReduction | None],
        *,
        whole: bool = False,
    ) -> list[SharedBucket]:
        """Maps table and buckets into the memory that was made from the layout (collective over the world).

        Args:
            memory: of the node.
            reduction_of: what sums gradients over some ranks, given these; called with the same ranks in the same
                order by all ranks.
            whole: ranks add whole buckets, not gradient by gradient.
        """
        topology = self._topology
        self.table.map(memory)
        by_node = [self._owners(len(ranks)) for ranks in topology.node_groups]
        # Every rank asks for all groups: making one is collective.
        reductions: dict[tuple[int, ...], GradientReduction | None] = {}
        buckets = []
        for number, (members, size, place) in enumerate(zip(self._members, self._sizes, self.places, strict=True)):
            ranks = tuple(group[by_node[node][number]] for node, group in enumerate(topology.node_groups))
            if ranks not in reductions:
                reductions[ranks] = reduction_of(ranks)
            dtype = members[0].dtype
            buffer = memory.tensor(place, (size // dtype.itemsize,), dtype)
            pieces = buffer.split([p.numel() for p in members])
            views = [buffer] if whole else [piece.view(p.shape) for piece, p in zip(pieces, members, strict=True)]
            owner = by_node[topology.node][number]
            is_complete = number not in self._again.values()
            mine = reductions[ranks] if is_complete and owner == topology.local_rank else None
            shapes = [p.shape for p in members]
            buckets.append(SharedBucket(buffer, views, owner, mine, shapes, self._again.get(number)))
        return buckets

    def _owners(self, ranks: int) -> list[int]:
        """Local ranks that the buckets of a node of some ranks belong to."""
        firsts = [self._owned_with.get(number, number) for number in range(len(self._sizes))]
        sizes = dict.fromkeys(firsts, 0)
        for number, (first, size) in enumerate(zip(firsts, self._sizes, strict=True)):
            if number not in self._again:
                sizes[first] += size
        chosen = dict(zip(sizes, owners(list(sizes.values()), ranks), strict=True))
        return [chosen[first] for first in firsts]
