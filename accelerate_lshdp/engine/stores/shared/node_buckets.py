# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The buckets of a node: where gradients lie in its memory, which rank owns each, and what sums it between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        members: of each bucket, the parameters whose gradients lie in it one after the other.
        layout: gets places for the buckets and for the table of the node.
        numbers: how many numbers the ranks of the node exchange at once.
        parts: of the model that are stepped one after the other.

    Attributes:
        table: of the node's progress; `map` maps it.
    """

    def __init__(
        self,
        topology: Topology,
        members: Sequence[Sequence[torch.Tensor]],
        layout: Layout,
        *,
        numbers: int = 0,
        parts: int = 0,
    ) -> None:
        self._topology = topology
        self._members = members
        self._sizes = [sum(p.numel() * p.dtype.itemsize for p in bucket) for bucket in members]
        self._places = [layout.place(size) for size in self._sizes]
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
        by_node = [owners(self._sizes, len(ranks)) for ranks in topology.node_groups]
        # Every rank asks for all groups: making one is collective.
        reductions: dict[tuple[int, ...], GradientReduction | None] = {}
        buckets = []
        for number, (members, size, place) in enumerate(zip(self._members, self._sizes, self._places, strict=True)):
            ranks = tuple(group[by_node[node][number]] for node, group in enumerate(topology.node_groups))
            if ranks not in reductions:
                reductions[ranks] = reduction_of(ranks)
            dtype = members[0].dtype
            buffer = memory.tensor(place, (size // dtype.itemsize,), dtype)
            pieces = buffer.split([p.numel() for p in members])
            views = [buffer] if whole else [piece.view(p.shape) for piece, p in zip(pieces, members, strict=True)]
            owner = by_node[topology.node][number]
            mine = reductions[ranks] if owner == topology.local_rank else None
            buckets.append(SharedBucket(buffer, views, owner, mine, [p.shape for p in members]))
        return buckets
