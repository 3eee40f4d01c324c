# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SlicedWeight`: one weight of which each rank keeps a chunk of rows, and which is gathered one slice at a time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.sliced.order import CollectiveOrder
from accelerate_lshdp.engine.stores.sliced.rows import RowSlices
from accelerate_lshdp.runtime.agreement import all_meet_here


#: Forwards of which a script reads the logits, until they are computed at once; it may read some for a log alone.
_MOST_READ = 2


class WaitingCall(Protocol):
    """A call of a head whose logits may turn out not to be needed."""

    def settle(self) -> None:
        """Computes its logits, if no loss was computed of them (collective)."""

    def leave_forward(self) -> None:
        """Says that the model's forward has ended."""


class SlicedWeight:
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
        rows: which of its rows are in which slice.
        pending: the sum over all ranks of this rank's rows of its gradient, as far as it is not in ``.grad``.
        hooks: of its gradient, by number: each is given a slice of it, of this rank alone, and returns another one.
        on_gradient: called when a backward has produced a gradient for it.
        waiting: while the model's forward runs, its calls as a head whose logits may not be needed. None: logits are
            computed at once.
        forwards: how many forwards of the model have begun.
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
        self.name = name
        self.places = list(places)
        self.device = device
        self.pending: torch.Tensor | None = None
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self.on_gradient: Callable[[], None] | None = None
        self.waiting: list[WaitingCall] | None = None
        self.forwards = 0
        self._depth = 0
        self._read = 0
        self._steps = 0
        self._kind = kind
        self._order = order
        self._group = kind.mesh.get_group()
        self.rows = RowSlices(whole.shape[0], kind.mesh.size(), slices)
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

    # In its modules

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter: what optimizers, state dicts and the script see."""
        # Asked of the module outside of forwards: `load_state_dict(assign=True)` puts another one there.
        if isinstance(found := self._registered(), DTensor):
            self._parameter = found
        return self._parameter

    def _registered(self) -> torch.Tensor:
        module, name = self.places[0]
        return module._parameters[name]

    def _set(self, tensor: torch.Tensor) -> None:
        # Not by setattr, which wants a Parameter, and which modules may have of their own.
        for module, name in self.places:
            module._parameters[name] = tensor

    def replace(self, stand_in: torch.Tensor) -> None:
        """Puts a stand-in where the parameter is registered."""
        self._parameter = self.parameter
        self._set(stand_in)

    def restore(self) -> None:
        """Registers the parameter again."""
        self._set(self.parameter)

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the forward."""
        return self._kind.policies.precision.param_dtype or self.parameter.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The precision in which gradients are summed."""
        return self._kind.policies.precision.reduce_dtype or self.parameter.dtype

    @property
    def version(self) -> tuple[int, int, int]:
        """What differs when the weight has changed."""
        # What optimizers do to many tensors at once counts for none of them.
        return id(self.parameter), self.parameter._version, self._steps

    def require_version(self, version: tuple[int, int, int]) -> None:
        """Raises RuntimeError if a backward is to gather other values than those of its forward, as autograd does."""
        if self.version != version:
            raise RuntimeError(
                f"found {self.name}, which is in slices, changed after a forward whose backward needs it, expected "
                "one weight in both: call backward before the optimizer's step, and before other values are loaded"
            )

    def will_change(self) -> None:
        """Says that an optimizer is about to change the weight, or that it is about to be loaded."""
        self._steps += 1

    # As a head, whose logits may wait

    def enter_forward(self) -> None:
        """Says that the model's forward begins: logits may wait, unless the script reads them anyway."""
        self._depth += 1
        if self._depth > 1:  # a model that calls itself: the outer forward is the one that ends last
            return
        self.forwards += 1
        self.waiting = [] if self._read < _MOST_READ else None

    def settle_logits(self) -> None:
        """Computes the logits of which the model's forward has computed no loss, as it ends (collective)."""
        if self._depth == 1:
            for call in self.waiting or ():
                call.settle()

    def leave_forward(self) -> None:
        """Says that the model's forward has ended, or was interrupted."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self.forget_forward()

    def forget_forward(self) -> None:
        """Says that no forward of the model runs, also where one was interrupted without a word."""
        self._depth = 0
        waiting, self.waiting = self.waiting, None
        for call in waiting or ():
            call.leave_forward()

    def read_logits(self, forward: int) -> None:
        """Says that a script is about to read logits that were not kept.

        Args:
            forward: the number of their forward, the same on all ranks.

        Raises:
            RuntimeError: not all ranks do so: the others are in another collective, and cannot be asked in one.
        """
        place = f"model {self._order.number}: logits of {self.name} of forward {forward}"
        if self.rows.ranks > 1 and not all_meet_here(place):
            raise RuntimeError(
                f"found the logits of {self.name} in use on this rank and not on all, expected it on all: the head "
                "is in slices, so all ranks gather its weight to compute them. Read them on all ranks, or give the "
                'unit of the head "slices": 1 in the placement'
            )
        self._read += 1

    # Slices

    def announce(self, what: str) -> None:
        """Says that this rank is about to use the weight (collective).

        Raises:
            RuntimeError: see `CollectiveOrder.announce`.
        """
        self._order.announce(f"{what} of {self.name}")

    def gather(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Gathers a slice (collective), shape (gathered rows, ...); padding is zeros."""
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
        """Sums a slice's gradient over the ranks (collective), and keeps this rank's rows.

        Args:
            index: of the slice.
            gradient: of this rank's loss, shape (gathered rows, ...); of padding, anything.
        """
        for hook in self.hooks.values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
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
