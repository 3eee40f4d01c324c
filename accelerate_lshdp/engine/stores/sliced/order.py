# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks that all ranks are about to start the same collective, as operators that some skip would mix up weights.

Collectives have no names: those of a group are matched by their order alone. Units are gathered around their whole
forward, which all ranks call; an operator inside a unit may be skipped, such as an expert that has no tokens. Another
expert's weight of the same size would then take its place, and nobody would know.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.wire.reduction import TimedAllGather
from accelerate_lshdp.runtime.wait_clock import WaitClock


_numbers = itertools.count()


class CollectiveOrder:
    """Compares what ranks are about to do, before they do it.

    Args:
        group: the ranks that compare.
        device: of the tensors that they exchange.
        clock: counts the time that it blocks.

    Attributes:
        number: the same on all ranks, which make one for each model in the same order: names of weights do not tell
            models apart.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, clock: WaitClock) -> None:
        self.number = next(_numbers)
        self._group = group
        self._device = device
        self._gather = TimedAllGather(clock)
        self._unread: list[tuple[str, torch.Tensor]] = []

    def announce(self, what: str) -> None:
        """Says what this rank is about to do (collective).

        Raises:
            RuntimeError: on all ranks, if others are about to do something else; where reading an answer would make
                the host wait for a device, not before `settle`.
        """
        if self._group.size() == 1:
            return
        own = torch.tensor([zlib.crc32(f"{self.number} {what}".encode())], device=self._device)
        answers = own.new_empty(self._group.size())
        self._gather(answers, own, self._group)
        self._unread.append((what, answers))
        if self._device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Reads the answers to what was announced.

        Raises:
            RuntimeError: as for `announce`.
        """
        unread, self._unread = self._unread, []
        for what, answers in unread:
            if len(set(answers.tolist())) > 1:
                self._refuse(what)

    def announced(self, kind: UnitKind) -> UnitKind:
        """The same way of keeping units, whose collectives are announced if they are among these ranks."""
        if kind.is_replicated:
            return kind
        return replace(
            kind,
            all_gather=_AnnouncedAllGather(kind.all_gather, self),
            reduce_scatter=_AnnouncedReduceScatter(kind.reduce_scatter, self),
        )

    def forget(self) -> None:
        """Forgets what was announced in a backward that failed."""
        self._unread.clear()

    def _refuse(self, what: str) -> None:
        # All ranks have the same answers, so all of them are here.
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, (self.number, what), group=self._group)
        several = len({number for number, _ in everyone}) > 1
        everyone = [f"{each} of prepared model {number}" if several else each for number, each in everyone]
        found = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(everyone))
        raise RuntimeError(
            f"found ranks in different operators of a model with slices ({found}), expected the same on all: a weight "
            "in slices is gathered from all ranks where it is used, so none may skip it (as an expert that has no "
            'tokens). Give the unit of these operators "slices": 1 in the placement, so that it is gathered as a whole'
        )


class _AnnouncedAllGather(AllGather):
    """An all-gather of FSDP2 that is announced, as collectives of operators in slices go through the same group.

    Args:
        gather: what it does.
        order: announces it.
    """

    def __init__(self, gather: AllGather, order: CollectiveOrder) -> None:
        self._gather = gather
        self._order = order

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._gather.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._order.announce(f"gathers a unit, {output_tensor.numel()} elements")
        return self._gather(output_tensor, input_tensor, group, async_op)


class _AnnouncedReduceScatter(ReduceScatter):
    """A reduce-scatter of FSDP2 that is announced, see `_AnnouncedAllGather`.

    Args:
        scatter: what it does.
        order: announces it.
    """

    def __init__(self, scatter: ReduceScatter, order: CollectiveOrder) -> None:
        self._scatter = scatter
        self._order = order

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._scatter.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._order.announce(f"sums gradients of a unit, {input_tensor.numel()} elements")
        return self._scatter(output_tensor, input_tensor, group, op, async_op)
