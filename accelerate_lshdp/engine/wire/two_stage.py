# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""All-gather and reduce-scatter over the world in two stages: between the nodes, and inside each node.

With N nodes of L ranks, W = N * L, every node sends for a payload of S bytes (what a rank holds after the gather, or
before the scatter) to the other nodes:

    flat, all-gather in a ring            (W-1)/W * S
    flat, reduce-scatter by all-to-all  L (N-1)/N * S
    two stages, either                    (N-1)/N * S

That is the least there is: a node has 1/N of the payload, and lacks the rest. It is the "communication with groups" of
OSDP (https://arxiv.org/abs/2209.13258). Ranks are numbered node by node, so rank ``node * L + local`` has, or gets,
piece ``[node, local]`` of a buffer of shape (N, L, piece), and the pieces of one node lie side by side: what is sent
or received is always a whole row of a buffer, and nothing has to be put in order afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from accelerate_lshdp.engine.wire.reduction import TimedAllGather, TimedReduceScatter
from accelerate_lshdp.runtime.wait_clock import WaitClock


@dataclass(frozen=True, slots=True)
class Stages:
    """The two groups of a rank.

    Attributes:
        inside: the ranks of its node, L of them on every node.
        across: the ranks with its place on their nodes, one a node, N of them.
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup

    def rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """A view of a buffer of the world: one row a node, shape (N, elements of a node)."""
        return buffer.view(self.across.size(), -1)


class TwoStageAllGather(AllGather):
    """All-gather in two stages: pieces of a rank's own place from the other nodes, then all of them inside the node.

    Args:
        stages: this rank's groups.
        clock: counts the time that it blocks.
    """

    def __init__(self, stages: Stages, clock: WaitClock) -> None:
        self.stages = stages
        self._gather = TimedAllGather(clock)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gathers in the order of the world's ranks; synchronous, whatever ``async_op`` asks for.

        Args:
            output_tensor: 1-D, W pieces.
            input_tensor: 1-D, this rank's piece; it may be a view of its place in ``output_tensor``.
            group: the world; or this rank's node, where a unit keeps the shards of the node after the forward.
            async_op: accepted because FSDP2 passes it.
        """
        if group.size() == self.stages.inside.size():
            self._gather(output_tensor, input_tensor, self.stages.inside)
            return
        across, inside = self.stages.across, self.stages.inside
        pieces = output_tensor.view(across.size(), inside.size(), -1)
        own = pieces[across.rank(), inside.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        # Between nodes first, while each rank still has its own piece only: after the stage inside a node, every rank
        # would send the whole row of its node. Each piece goes where it belongs, so neither stage needs more memory.
        self._gather.fill([row[inside.rank()] for row in pieces], across)
        for row in pieces:
            self._gather(row.view(-1), row[inside.rank()], inside)


class TwoStageReduceScatter(ReduceScatter):
    """Reduce-scatter in two stages: inside each node for every place, then the sums of the nodes.

    Args:
        stages: this rank's groups.
        clock: counts the time that it blocks.
        dtype: precision of what travels between nodes (None: that of the gradients). Inside a node, and in all sums,
            it is the gradients' own.
        convert: makes ``dtype`` of the gradients.
    """

    def __init__(
        self,
        stages: Stages,
        clock: WaitClock,
        *,
        dtype: torch.dtype | None = None,
        convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = torch.Tensor.to,
    ) -> None:
        self.stages = stages
        self._scatter_inside = TimedReduceScatter(clock)
        self._scatter_across = TimedReduceScatter(clock, dtype=dtype, convert=convert)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sums and scatters in the order of the world's ranks.

        Args:
            output_tensor: 1-D, this rank's piece of the sum.
            input_tensor: 1-D, W pieces.
            group: the world (not used: ``stages`` are).
            op: the sum.
            async_op: False.

        Raises:
            ValueError: another ``op``, or ``async_op``.
        """
        sums = self.stages.rows(input_tensor.new_empty(self.stages.across.size() * output_tensor.numel()))
        # Inside the node first, where bytes are cheap: then one sum a node crosses the network instead of L gradients.
        for node, piece in zip(self.stages.rows(input_tensor), sums, strict=True):
            self._scatter_inside(piece, node, self.stages.inside, op, async_op)
        self._scatter_across(output_tensor, sums.view(-1), self.stages.across, op, async_op)
