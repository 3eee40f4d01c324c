# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ShardedWeight`: one weight of which each rank keeps a chunk of rows, and which is gathered one slice at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.sliced.order import CollectiveOrder
from accelerate_lshdp.engine.stores.sliced.rows import RowSlices
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight
from accelerate_lshdp.runtime.agreement import all_meet_here


class ShardedWeight(SlicedWeight):
    """A weight whose rows are cut among the ranks of a mesh, in the place of the whole one in its modules.

    Args:
        name: of the parameter in the model.
        whole: the parameter, the same on all ranks; it is not kept.
        places: modules that have it, and its name in each.
        slices: in which it is gathered.
        kind: how its unit is kept.
        device: where the forward runs.
        order: announces its collectives.

    Attributes:
        pending: the sum over all ranks of this rank's rows of its gradient, as far as it is not in ``.grad``.
        on_gradient: called when a backward has produced a gradient for it.
    """

    def __init__(
        self,
        name: str,
        whole: nn.Parameter,
        places: Sequence[tuple[nn.Module, str]],
        slices: int,
        *,
        kind: UnitKind,
        device: torch.device,
        order: CollectiveOrder,
    ) -> None:
        super().__init__(name, places, RowSlices(whole.shape[0], kind.mesh.size(), slices), device=device)
        self.pending: torch.Tensor | None = None
        self.on_gradient: Callable[[], None] | None = None
        self._kind = kind
        self._order = order
        self._group = kind.mesh.get_group()
        start = self._group.rank() * self.rows.chunk
        # A copy: a view would keep the whole weight alive. FSDP2 cuts in the same way.
        chunk = whole.detach()[start : start + self.rows.chunk].to(device, copy=True).contiguous()
        sharded = self._as_sharded(chunk, whole.shape)
        self._set(nn.Parameter(sharded, requires_grad=whole.requires_grad))

    def _as_sharded(self, local: torch.Tensor, shape: torch.Size) -> DTensor:
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return DTensor.from_local(
            local, self._kind.mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
        ).detach()

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter: what optimizers, state dicts and the script see."""
        # Asked of the module outside of forwards: `load_state_dict(assign=True)` puts another one there.
        if isinstance(found := self._registered(), DTensor):
            self._parameter = found
        return self._parameter

    def replace(self, stand_in: torch.Tensor) -> None:
        self._parameter = self.parameter
        self._set(stand_in)

    @property
    def dtype(self) -> torch.dtype:
        return self._kind.policies.precision.param_dtype or self.parameter.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._kind.policies.precision.reduce_dtype or self.parameter.dtype

    @property
    def version(self) -> tuple[int, int, int]:
        # What optimizers do to many tensors at once counts for none of them.
        return id(self.parameter), self.parameter._version, self._steps

    def read_logits(self, forward: int) -> None:
        # The others may be in another collective, so they cannot be asked in one.
        place = f"model {self._order.number}: logits of {self.name} of forward {forward}"
        if self.rows.ranks > 1 and not all_meet_here(place):
            raise RuntimeError(
                f"found the logits of {self.name} in use on this rank and not on all, expected it on all: the head "
                "is in slices, so all ranks gather its weight to compute them. Read them on all ranks, or give the "
                'unit of the head "slices": 1 in the placement'
            )
        super().read_logits(forward)

    # Slices

    def announce(self, what: str) -> None:
        self._order.announce(f"{what} of {self.name}")

    def gather(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        own = self._local()[self.rows.own(self._group.rank(), index)]
        shape = (self.rows.gathered, *own.shape[1:])
        flat = self._kind.all_gather.allocate((math.prod(shape),), dtype=dtype, device=self.device)
        # The rank's own part is a view of its place, as that of FSDP2's units: no second buffer.
        part = flat.view(self.rows.ranks, -1)[self._group.rank()]
        used = own.numel()
        part[:used].copy_(own.reshape(-1))
        part[used:].zero_()  # products with padding must not be NaN
        if self.rows.ranks > 1:
            self._kind.all_gather(output_tensor=flat, input_tensor=part, group=self._group, async_op=False)
        return flat.view(shape)

    def reduce(self, index: int, gradient: torch.Tensor) -> None:
        """Sums a slice's gradient over the ranks (collective), and keeps this rank's rows."""
        gradient = self._through_hooks(gradient)
        sent = gradient.to(self.reduce_dtype).reshape(-1)
        if self.rows.ranks > 1:
            summed = self._kind.reduce_scatter.allocate(
                (sent.numel() // self.rows.ranks,), dtype=sent.dtype, device=sent.device
            )
            self._kind.reduce_scatter(
                output_tensor=summed, input_tensor=sent, group=self._group, op=dist.ReduceOp.SUM, async_op=False
            )
        else:
            summed = sent
        local = self._local()
        if self.pending is None:
            self.pending = torch.zeros_like(local)
        rows = self.pending[self.rows.own(self._group.rank(), index)]
        rows.add_(summed[: rows.numel()].view(rows.shape))
        if self.on_gradient is not None:
            self.on_gradient()

    def deliver(self) -> None:
        """Adds what is pending to ``.grad``."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = self._as_sharded(pending, parameter.shape)
        else:
            parameter.grad.to_local().add_(pending)

    @torch.no_grad()
    def _local(self) -> torch.Tensor:
        return self.parameter.detach().to_local()
