# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whole parameters on every rank: gradients are summed in buckets while the backward goes on.

All of a model under ``ddp``, and on CPUs under ``lsdp`` with one rank a node; units of it under ``osdp``.

The buckets are fixed from the first step on (torch's DDP rebuilds its own after one step), so a resumed run adds the
same numbers in the same order as an uninterrupted one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from accelerate_lshdp.engine.module_state import is_noop_conversion, parameters_of
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.wire.buckets import fill_buckets
from accelerate_lshdp.engine.wire.reduction import GradientReduction, OrderedReductions


class _Bucket:
    """Some parameters, by their indices, and the flat buffer in which their gradients travel."""

    def __init__(self, indices: Sequence[int], members: Sequence[nn.Parameter], buffer: torch.Tensor) -> None:
        self.indices = indices
        self.shapes = [parameter.shape for parameter in members]
        self.buffer = buffer
        pieces = buffer.split([p.numel() for p in members])
        self.views = {i: piece.view(p.shape) for i, p, piece in zip(indices, members, pieces, strict=True)}
        self.filled: set[int] = set()  # indices of the parameters whose gradient is in the buffer in this backward


class WholeStore(Store):
    """Parameters that are whole on every rank (collective to make, as its buffers are).

    A gradient is scaled by 1/world when it enters its bucket and summed over ranks, so a gradient that is already the
    same on all ranks stays as it is: backward passes may be synchronised one by one or accumulated first. Beside other
    stores, which sum gradients as they are, so does this one, and takes those that are final out of their way.

    Args:
        context: of the model, which is on its device, identical on all ranks.
        reduction: sums a buffer over all ranks.
        parameters: those in this store. None: all of the model, which has no other store then.
        bucket_bytes: size of a bucket: small ones start earlier, large ones use the network better. None: chosen from
            the model's size and ``reducing_ranks``.
        reducing_ranks: number of ranks that sum a bucket.
    """

    can_step_locally = True

    def __init__(
        self,
        context: StoreContext,
        reduction: GradientReduction | None,
        *,
        parameters: Sequence[nn.Parameter] | None = None,
        bucket_bytes: int | None,
        reducing_ranks: int,
    ) -> None:
        super().__init__(context)
        self.world_size = reduction.group.size() if reduction is not None else 1
        # Losses carry their share of the global batch, and gradients get 1/world as they enter their bucket: together
        # that is the sum of the shares. Beside other stores the loss is that of all of them.
        self.loss_multiplier = float(self.world_size) if parameters is None else 1.0
        self._scale = 1 / self.world_size if parameters is None else 1.0
        own = parameters_of(context.module) if parameters is None else parameters
        self._parameters = [p for p in own if p.requires_grad]
        self._earlier: dict[int, torch.Tensor] = {}  # gradients that were final before this backward
        self._final: set[int] = set()  # parameters whose .grad is the sum over all ranks
        self._buckets = self._fill_buckets(reduction, bucket_bytes, reducing_ranks) if reduction is not None else []
        self._bucket_of = {i: (n, bucket) for n, bucket in enumerate(self._buckets) for i in bucket.indices}
        self._reductions = (
            OrderedReductions(reduction, context.clock, len(self._buckets)) if reduction is not None else None
        )
        self._synchronise = False
        for index, parameter in enumerate(self._parameters):
            context.attachments.add(parameter.register_post_accumulate_grad_hook(self._hook(index)))

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        # Those of the model that other stores have may be elsewhere.
        device = next(iter(self._parameters or parameters_of(self.module))).device
        return is_noop_conversion(convert, self.module, device)  # torch copies even from "cpu" to "cpu:0"

    def _fill_buckets(
        self, reduction: GradientReduction, bucket_bytes: int | None, reducing_ranks: int
    ) -> list[_Bucket]:
        buckets = fill_buckets(self._parameters, bucket_bytes, reducing_ranks)
        members = [[self._parameters[index] for index in bucket] for bucket in buckets]
        return [_Bucket(*made) for made in zip(buckets, members, reduction.make_buffers(members), strict=True)]

    def _hook(self, index: int):  # noqa: ANN202 - a closure for autograd
        reference = weakref.ref(self)  # a cycle through a hook of autograd would never be collected

        def gradient_is_ready(parameter: torch.Tensor) -> None:
            store = reference()
            if store is None:
                return
            store.context.mark_used(index)
            if store._synchronise:
                store._fill(index, parameter)
            elif store._buckets:
                store._keep_in_bucket(index, parameter)

        return gradient_is_ready

    def _keep_in_bucket(self, index: int, parameter: torch.Tensor) -> None:
        """Lets a gradient that waits for others of its step live in its bucket, as memory for both would be double."""
        view, gradient = self._bucket_of[index][1].views[index], parameter.grad
        if gradient.data_ptr() != view.data_ptr() or gradient.shape != view.shape:
            view.copy_(gradient)
            parameter.grad = view.detach()  # see `_fill`

    def _fill(self, index: int, parameter: torch.Tensor) -> None:
        number, bucket = self._bucket_of[index]
        view = bucket.views[index]
        gradient = parameter.grad
        # None: this rank did not use the parameter. Others may have, so zeros travel. In place: an earlier backward
        # has left the sum there, and autograd has added to it.
        if gradient is None:
            view.zero_()
        elif gradient.data_ptr() == view.data_ptr() and gradient.shape == view.shape:
            view.mul_(self._scale)
        else:
            torch.mul(gradient, self._scale, out=view)
        # Autograd's own tensor is freed here; from now on the bucket is where the gradient lives.
        # An alias, because .to() and its like exchange the data of the tensor that they find in .grad.
        parameter.grad = view.detach()
        bucket.filled.add(index)
        if len(bucket.filled) == len(bucket.indices):
            self._reductions.ready(number, bucket.buffer, bucket.shapes)

    def _check_places(self) -> None:
        """The script may move or convert the model, to export it or for good; then there is no backward any more."""
        for index, parameter in enumerate(self._parameters):
            view = self._bucket_of[index][1].views[index] if self._buckets else parameter
            if parameter.dtype != view.dtype or parameter.device != view.device:
                raise RuntimeError(
                    f"found a parameter of {parameter.dtype} on {parameter.device}, which was {view.dtype} on "
                    f"{view.device} when prepare() laid out its gradient. Convert or move the model (.to(), .half(), "
                    "...) before prepare(), or work on a copy.deepcopy of it"
                )

    def begin(self, synchronise: bool) -> None:
        self._check_places()
        self._set_final_aside()
        self._synchronise = synchronise and self._reductions is not None
        # Before autograd: .grad are views of the buckets, which a reduction that was given up may still write to.
        if self._reductions is not None:
            self._reductions.begin()
        for bucket in self._buckets:
            bucket.filled.clear()

    def _set_final_aside(self) -> None:
        """Takes gradients that are the sum over all ranks out of ``.grad``: they must not be summed again."""
        if self._final or self._earlier:
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is None:
                    self._earlier.pop(index, None)  # the script has dropped what this was to be added to
                elif index in self._final:
                    self._earlier[index] = parameter.grad.clone()  # its memory is the bucket's, which is filled anew
                    parameter.grad = None
            self._final.clear()

    def _give_back_final(self) -> None:
        for index, gradient in self._earlier.items():
            self._parameters[index].grad.add_(gradient)
        self._earlier.clear()

    def drop_unsummed(self, parameters: Collection[int] | None = None) -> None:
        for index in [i for i in self._earlier if parameters is None or id(self._parameters[i]) in parameters]:
            del self._earlier[index]

    def deliver(self) -> None:
        if not self._synchronise:
            return
        # Parameters that this rank did not use: the buckets that wait for them are full then, and travel.
        for bucket in self._buckets:
            for index in bucket.indices:
                if index not in bucket.filled:
                    self._fill(index, self._parameters[index])

    def finish(self) -> None:
        if self._synchronise:
            self._synchronise = False
            self._reductions.finish()
            self._give_back_final()
            if self._scale == 1.0:  # else a gradient that is final is scaled, and may be summed again
                self._final.update(range(len(self._parameters)))
        else:
            # None would say that the script has dropped the gradient, with what was set aside of it.
            for index in self._earlier:
                if self._parameters[index].grad is None:
                    self._parameters[index].grad = torch.zeros_like(self._parameters[index])

    def cancel(self) -> None:
        self._synchronise = False
        for index in [index for index in self._earlier if self._parameters[index].grad is None]:
            self._parameters[index].grad = self._earlier.pop(index)
            self._final.add(index)

    def abandon(self) -> None:
        if self._synchronise:  # else other ranks have all that they wait for, or wait for nothing
            self._reductions.reduction.abandon()
        self._synchronise = False
        self._earlier.clear()
        self._final.clear()
        if self._reductions is not None:
            self._reductions.reset()

    def close(self) -> None:
        if self._reductions is not None:
            self._reductions.reduction.close()
