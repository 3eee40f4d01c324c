# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Sums over all ranks of gradients that every rank has whole, inside each node in memory that its ranks share.

The first rank of a node has its buffers in the node's memory. The others add theirs to them; the rank that owns a
buffer sums it with the owners on other nodes; when the sum is there, the others copy it back. So a node sends
2 (N-1)/N of the gradients for N nodes, whatever the number of its ranks, where a ring over all W ranks sends
2 (W-1)/W. Inside a node nothing goes through sockets, and buffers need no more memory than without. A lossy format
rounds, and keeps what it left out, once a node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from accelerate_lshdp.engine.stores.shared.memory import Layout, NodeMemory
from accelerate_lshdp.engine.stores.shared.node_buckets import NodeBuckets
from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


class NodeSums(GradientReduction):
    """Sums the buffers of one model on the CPU over all ranks, inside each node in shared memory.

    Buffers are started in the order of their indices; index 0 begins a backward.

    Args:
        topology: nodes and ranks; nodes may have different numbers of ranks.
        reduction_of: what sums gradients over some ranks, one a node, given these (collective over the world).
        clock: counts the time spent waiting.
        timeout_seconds: how long to wait for another rank of the node.
    """

    def __init__(
        self,
        topology: Topology,
        reduction_of: Callable[[tuple[int, ...]], GradientReduction | None],
        clock: WaitClock,
        timeout_seconds: float,
    ) -> None:
        super().__init__(dist.group.WORLD)
        self._topology = topology
        self._reduction_of = reduction_of
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._node: _CopiedSums | None = None
        self._shared: list[torch.Tensor] = []

    def make_buffers(self, members: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """As `GradientReduction.make_buffers`; those of a node's first rank are in the memory of the node.

        Raises:
            NodeMemoryError: on all ranks, if the ranks of a node cannot share memory.
        """
        if not members:
            return []
        layout = Layout()
        made = NodeBuckets(self._topology, members, layout)
        memory = NodeMemory.create(self._topology, layout.bytes)
        buckets = made.map(memory, self._reduction_of, whole=True)
        self._shared = [bucket.buffer for bucket in buckets]
        self._node = _CopiedSums(memory, made.table, buckets, self._clock, self._timeout_seconds)
        # The thread holds the node's reduction, not this object: when this is dropped, the thread ends.
        weakref.finalize(self, self._node.close)
        return self._shared if self._topology.local_rank == 0 else super().make_buffers(members)

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        # Only now, and not with the backward: ranks whose numbers of micro-batches differ make different numbers of
        # backwards, but sum the same ones.
        if index == 0:
            self._node.begin()
        shared = self._shared[index]
        added = None if buffer is shared else buffer  # the sum begins with what the first rank has there already
        self._node.ready(index, [added], [False], True)
        return _PendingSum(self._node, index, buffer, shared)

    def abandon(self) -> None:
        if self._node is not None:
            self._node.give_up()

    def close(self) -> None:
        if self._node is not None:
            self._node.close()


class _CopiedSums(NodeReduction):
    """A `NodeReduction` whose buckets are waited for one by one, and copied by the ranks that do not have them."""

    _is_open = False  # whether a backward has begun whose sums are not all there yet

    def begin(self) -> None:
        super().begin()
        self._is_open = True

    def abandon(self) -> None:
        self._is_open = False
        super().abandon()

    def give_up(self) -> None:
        """Gives up a backward that failed on this rank, wherever it was: others may wait for its first bucket."""
        # Counted in any case: the others have begun it, and the next one has to have the same number on all ranks.
        if not self._is_open:
            self.begin()
        self.abandon()

    def is_final(self, index: int) -> bool:
        """Whether a bucket holds the final sum of this backward."""
        return bool(self._table.final[index] >= self._backward)

    def finish_bucket(self, index: int, copy: Callable[[], None] | None) -> None:
        """Waits for the final sum of a bucket; after the last one, until this rank may change all of them.

        The seconds are the caller's to count.

        Args:
            index: of the bucket; all ranks take them in the order of their indices.
            copy: takes the sum out of the bucket; None: it is used where it is.

        Raises:
            RuntimeError: another rank has gone, failed, or did not come in time.
        """
        if self._buckets[index].owner == self._rank:
            self._finish_owned(index)
        self._wait(lambda: self.is_final(index), "sum gradients between nodes")
        if copy is not None:
            copy()
        if index < len(self._buckets) - 1:
            return
        self._is_open = False
        # Once, and not for each bucket: ranks would wake each other, and the owner of the next bucket would wait.
        self._publish(self._table.taken, self._rank, self._backward)
        if copy is None:
            # The script may change gradients where they are, by clipping or zero_grad: the others need theirs first.
            taken = self._table.taken
            # One that has its copy may end, if this was the last step, before others have theirs.
            self._wait(
                lambda: bool((taken >= self._backward).all()),
                "copy the sum of their gradients",
                lambda: np.flatnonzero(taken < self._backward).tolist(),
            )


class _PendingSum(PendingReduction):
    """A buffer whose sum is being made in the node's memory.

    Args:
        node: sums it.
        index: of the bucket.
        buffer: gets the sum.
        shared: the bucket; on the node's first rank it is the buffer.
    """

    def __init__(self, node: _CopiedSums, index: int, buffer: torch.Tensor, shared: torch.Tensor) -> None:
        self._node = node
        self._index = index
        self._buffer = buffer
        self._shared = shared
        self._error: Exception | None = None
        self._is_over = False

    def is_done(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        # What belongs to a backward that failed is waited for again before the next one begins.
        if self._error is not None:
            raise self._error
        if self._is_over:
            return
        try:
            self._node.finish_bucket(self._index, None if self._buffer is self._shared else self._copy)
        except Exception as error:
            self._error = error
            # Other ranks of the node may wait for this one's part, which does not come any more.
            self._node.abandon()
            raise
        self._is_over = True

    def _copy(self) -> None:
        with torch.no_grad():
            self._buffer.copy_(self._shared)
