# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Sums over all ranks by collectives, inside each node first: for devices, and where ranks cannot share memory.

A buffer is summed to one rank of each node, these ranks sum it between nodes in the format of the run, and each hands
the sum to its node. The buffers of a step are divided among the ranks of a node, so all of them have some to send, and
nodes may have different numbers of ranks. Whole buffers, and not a part of each for every rank: a format that looks at
the shapes of gradients needs them whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.runtime.profiler_labels import label


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank does with some of the buffers.

    Args:
        owner: the rank of its node that sums them between nodes.
        between: sums them between nodes; None: another rank of the node does.
    """

    owner: int
    between: GradientReduction | None


class NodeFirstReduction(GradientReduction):
    """Sums buffers over all ranks: inside the node, between nodes, and back into the node.

    Args:
        world: all ranks.
        inside: the ranks of this node; None: it has one.
        places: buffers take them in turn, by their index.
    """

    def __init__(self, world: dist.ProcessGroup, inside: dist.ProcessGroup | None, places: Sequence[Place]) -> None:
        super().__init__(world)
        self._inside = inside
        self._places = places
        self._started: deque[_Pending] = deque()  # on the host, those that do not travel between nodes yet
        self._stream: torch.Stream | None = None

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        place = self._places[index % len(self._places)]
        if buffer.device.type != "cpu":
            if self._stream is None:
                self._stream = torch.get_device_module(buffer.device).Stream(buffer.device)
            return _Streamed(buffer, index, shapes, place, self._inside, self._stream)
        pending = _Pending(self, buffer, index, shapes, place, self._inside)
        self._started.append(pending)
        # A buffer travels on when its node's sum is there. Nobody waits for that in the middle of a backward: each
        # new buffer is an occasion to look. So it leaves one buffer later, and no thread is needed.
        self.send_summed()
        return pending

    def send_summed(self, wait: bool = False) -> None:
        """Sends buffers on between nodes that are summed inside this one.

        Args:
            wait: for all that were started.
        """
        # In the order of starting, and none before the one before it: owners on all nodes start the same buffers in
        # the same order.
        while self._started and (wait or self._started[0].is_summed()):
            self._started.popleft().send()


class _Pending(PendingReduction):
    """A buffer on the host between ``start`` and ``wait``."""

    def __init__(
        self,
        reduction: NodeFirstReduction,
        buffer: torch.Tensor,
        index: int,
        shapes: Sequence[torch.Size],
        place: Place,
        inside: dist.ProcessGroup | None,
    ) -> None:
        self._reduction = reduction
        self._buffer = buffer
        self._index = index
        self._shapes = shapes
        self._place = place
        self._inside = inside
        self._summed: dist.Work | None = None
        if inside is not None:
            with label("node_reduce"):
                self._summed = dist.reduce(buffer, place.owner, group=inside, async_op=True)
        self._between: PendingReduction | None = None
        self._is_over = False

    def is_summed(self) -> bool:
        """Whether the owner in this node has the sum of the node."""
        return self._summed is None or self._summed.is_completed()

    def send(self) -> None:
        """Starts the sum between nodes, on the rank that owns the buffer; waits for that of the node."""
        if self._summed is not None:
            self._summed.wait()
        if self._place.between is not None:
            self._between = self._place.between.start(self._buffer, self._index, self._shapes)

    def is_done(self) -> bool:
        return self._is_over  # the last stage is made by `wait`

    def wait(self) -> None:
        if self._is_over:
            return
        # All that this rank has started, before it waits for the first of them: while that one comes back into the
        # node, the others travel.
        self._reduction.send_summed(wait=True)
        if self._between is not None:
            self._between.wait()
        # In the group of the first stage: all ranks have started all buffers that they wait for by now, and wait for
        # them in the order of starting, so gloo matches these, too.
        if self._inside is not None:
            dist.broadcast(self._buffer, self._place.owner, group=self._inside)
        self._is_over = True


class _Streamed(PendingReduction):
    """A buffer on a device with streams: all stages are queued on one stream at once."""

    def __init__(
        self,
        buffer: torch.Tensor,
        index: int,
        shapes: Sequence[torch.Size],
        place: Place,
        inside: dist.ProcessGroup | None,
        stream: torch.Stream,
    ) -> None:
        self._device = torch.get_device_module(buffer.device)
        # The gradients in the buffer are still being computed on the current stream.
        stream.wait_stream(self._device.current_stream(buffer.device))
        # Each `wait` makes this stream wait, not the host. One stream for all buffers: the stages of two groups are
        # queued in the same order on all ranks, so none of them waits for one that another rank has queued behind it.
        with self._device.stream(stream):
            if inside is not None:
                with label("node_reduce"):
                    dist.reduce(buffer, place.owner, group=inside, async_op=True).wait()
            if place.between is not None:
                place.between.start(buffer, index, shapes).wait()
            if inside is not None:
                dist.broadcast(buffer, place.owner, group=inside, async_op=True).wait()
        # The allocator knows of the stream that the buffer was made on; this one may still work on it when it is
        # dropped.
        buffer.record_stream(stream)
        self._finished = stream.record_event()

    def is_done(self) -> bool:
        return self._finished.query()

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._finished)
