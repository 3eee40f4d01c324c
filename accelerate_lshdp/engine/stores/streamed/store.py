# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Parameters in host memory, one copy a node, that are streamed through the device unit by unit: ``lsdp`` on devices.

Parameters, gradients and optimizer states are those of `SharedStore`, in memory that all ranks of the node map and
that is registered with their devices. In a forward or backward each unit of the model is copied to the device before
it computes, and dropped after it (`Streaming`). Its gradients are copied to the host while the backward goes on,
added there over the ranks of the node, and summed between nodes.

Where the units compute in lower precision, a copy of the parameters in it lies beside them, so that half as much is
copied to the device. Each rank brings those up to date that it has stepped, which it does late where it can
(`LateStep`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_lshdp.documents.bucket_sizes import LARGEST_BYTES, WAITING_BUCKETS
from accelerate_lshdp.engine.module_state import change, is_noop_conversion, parameters_of
from accelerate_lshdp.engine.stores.shared.bucket import GradientSource
from accelerate_lshdp.engine.stores.shared.memory import Layout, NodeMemory
from accelerate_lshdp.engine.stores.shared.store import SharedStore
from accelerate_lshdp.engine.stores.streamed.buffers import move, move_buffers
from accelerate_lshdp.engine.stores.streamed.gradients import DeviceGradients
from accelerate_lshdp.engine.stores.streamed.kept_gradients import KeptGradients
from accelerate_lshdp.engine.stores.streamed.late_step import LateStep
from accelerate_lshdp.engine.stores.streamed.micro_batches import MicroBatches
from accelerate_lshdp.engine.stores.streamed.pinning import register_on_all_ranks
from accelerate_lshdp.engine.stores.streamed.streamable import require_plain
from accelerate_lshdp.engine.stores.streamed.streaming import Streaming
from accelerate_lshdp.engine.stores.streamed.unit import StreamedUnit
from accelerate_lshdp.engine.stores.streamed.waiting import PartOfGradient, let_go, part_of_gradient
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.topology import Topology


#: Seconds that computed gradients wait for other ranks of the node where a backward must not wait for them; then they
#: are copied to host memory. Not 0: ranks of a node have gradients at about the same time, and a copy costs more.
PATIENCE_SECONDS = 0.1


class StreamedStore(SharedStore):
    """Parameters of a node in host memory, on the device while they are computed with (collective to make).

    Args:
        device: where the forward runs.
        units: groups of modules that are on the device together.
        has_rest: whether what is in none of them is streamed, too; else another store keeps it.
        ahead: number of units that are copied while one computes.
        compute_dtype: that units compute in; None: that of their parameters.
        output_dtype: that floating-point outputs of the model are cast to, None: as they are.
        keeps_gradients: whether gradients stay on the device until the last micro-batch of a step, if they fit.
        *args: as for `SharedStore`; the model may be in host memory or on the device.
        **kwargs: likewise.

    Raises:
        NodeMemoryError: on all ranks, if the ranks of a node cannot share memory, or a device cannot use it.
    """

    def __init__(
        self,
        *args: Any,
        device: torch.device,
        units: Sequence[tuple[nn.Module, ...]],
        has_rest: bool,
        ahead: int,
        compute_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        keeps_gradients: bool,
        **kwargs: Any,
    ) -> None:
        self._device = device
        self._modules = units
        self._has_rest = has_rest
        self._ahead = ahead
        self._compute_dtype = compute_dtype
        self._output_dtype = output_dtype
        self._are_cast = False
        self._may_keep = keeps_gradients
        super().__init__(*args, **kwargs)

    # Setting up: first places in the memory that is still to be made, then what lies there

    def _place_parameters(self, layout: Layout) -> list[int]:
        require_plain(self._everything)
        for parameter in self._everything:
            self.context.attachments.at_removal(functools.partial(move, parameter, parameter.device))
        # Unit by unit, so that each is one piece, which is copied at once.
        self._members = self._divide()
        places = {index: layout.place(_bytes_of(self._everything[index])) for index in sum(self._parts(), [])}
        self._sources = places
        return [places[index] for index in range(len(self._everything))]

    def _divide(self) -> list[list[int]]:
        """Indices of the parameters of each unit; the last one is what is in no unit."""
        indices = {id(parameter): index for index, parameter in enumerate(self._everything)}
        rest = dict.fromkeys(indices.values())
        members = []
        for modules in self._modules:
            own = dict.fromkeys(
                indices[id(p)] for module in modules for p in parameters_of(module) if id(p) in indices
            )
            members.append([index for index in own if index in rest])
            for index in own:
                rest.pop(index, None)
        return [*members, list(rest)]

    def _parts(self) -> list[list[int]]:
        """Indices of the parameters that are stepped, and then read by the device, together: units first."""
        return self._members

    def _stepped_parts(self) -> int:
        return len(self._parts())

    def _place_beside(self, layout: Layout, topology: Topology) -> None:
        if any(self._computed_dtype(parameter) != parameter.dtype for parameter in self._everything):
            self._sources = {
                index: layout.place(
                    self._everything[index].numel() * self._computed_dtype(self._everything[index]).itemsize
                )
                for index in self._sources
            }
            self._are_cast = True
        sizes = (sum(_bytes_of(self._piece_of_parameter(piece)) for piece in bucket) for bucket in self._layout)
        largest = max(sizes, default=0)
        largest = min(largest, LARGEST_BYTES)  # those of large parameters come in pieces
        stagings = [layout.place(largest) for _ in topology.node_groups[topology.node]]
        self._staging = slice(stagings[topology.local_rank], stagings[topology.local_rank] + largest)

    def _computed_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        casts = self._compute_dtype is not None and parameter.dtype.is_floating_point
        return self._compute_dtype if casts else parameter.dtype

    def _take_memory(self, memory: NodeMemory, masters: Sequence[torch.Tensor], topology: Topology) -> GradientSource:
        self._is_alone = topology.world_size == 1
        # Weakly, as gradients have it, and they must not keep the model alive.
        used = weakref.WeakMethod(self._part_is_used)
        self._settle_parts = lambda: (found := used()) and found()
        self._bytes = memory.whole()
        # Also where the model is dropped, and not closed: memory that is registered must not be unmapped.
        memory.at_end(register_on_all_ranks(self._bytes, self._device, topology))
        self._casts = {}
        if self._are_cast:
            self._casts = {
                index: memory.tensor(place, masters[index].shape, self._computed_dtype(masters[index]))
                for index, place in self._sources.items()
            }
            if memory.local_rank == 0:
                self._cast(masters, self._casts)
        self._arriving = DeviceGradients(self._device, self._bytes[self._staging])
        self._kept = KeptGradients(self._parameters, self._device, self._arriving, without=self._sliced_pieces)
        return self._arriving

    def _make_leaves(self) -> dict[int, torch.Tensor]:
        copies = torch.get_device_module(self._device).Stream(self._device)
        units = []
        for modules, members in zip([*self._modules, (self.module,)], self._members, strict=True):
            masters = [self._everything[index] for index in members]
            dtypes = [self._computed_dtype(master) for master in masters]
            first = self._sources[members[0]] if members else 0
            offsets = [self._sources[index] - first for index in members]
            count = offsets[-1] + masters[-1].numel() * dtypes[-1].itemsize if members else 0
            source = self._bytes[first : first + count]
            places = list(zip(offsets, dtypes, strict=True))
            units.append(StreamedUnit(modules, masters, source, places, self._device, copies))
        self._copies = copies
        self._ids = {id(parameter) for parameter in self._everything}
        self._micro_batches = MicroBatches(
            self._kept, self._reduction, self._may_keep, waits_for_step=bool(self._others_on_device())
        )
        self._late = self._make_late_step()
        self._streaming = Streaming(
            units,
            self._device,
            late=self._late,
            ahead=self._ahead,
            compute_dtype=self._compute_dtype,
            output_dtype=self._output_dtype,
            casts_rest=self._has_rest,
            attachments=self.context.attachments,
        )
        move_buffers(self.module, self._device, self.context.attachments)
        places = {id(m): (unit, place) for unit in units for place, m in enumerate(unit.masters)}
        self._place_in_unit = {i: places[id(p)] for i, p in enumerate(self._parameters) if id(p) in places}
        self._leaves = {index: unit.leaves[place] for index, (unit, place) in self._place_in_unit.items()}
        self._master_of = {id(leaf): self._parameters[index] for index, leaf in self._leaves.items()}
        self._are_stepped = self._others_are_stepped = False
        self.context.attachments.at_removal(self._stop_reading)
        self.context.attachments.at_removal(self._leave_no_parts)
        for master in self._parameters:
            self.context.attachments.add(master.register_post_accumulate_grad_hook(_refuse_gradient_of_master))
        streaming, late = self._streaming, self._late

        def before_state_dict(*_: Any) -> None:
            late.settle()
            streaming.give_back()

        for module in self.module.modules():
            self.context.attachments.add(module.register_state_dict_pre_hook(before_state_dict))
            if isinstance(module, nn.RNNBase):
                # cuDNN's own memory for all weights would take those on the device away from the unit.
                change(module, "flatten_parameters", _leave_apart, self.context.attachments)
        return self._leaves

    def _others_on_device(self) -> set[int]:
        """The identities of trained parameters of the model that other stores keep; these may replace them."""
        return {id(p) for p in parameters_of(self.module) if p.requires_grad} - self._ids

    def _make_late_step(self) -> LateStep:
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        trained = {index: places[id(p)] for index, p in enumerate(self._everything) if id(p) in places}
        parts = [[trained[index] for index in members if index in trained] for members in self._parts()]
        owned = [place for place in trained.values() if self._owns(place)]
        # Lists of tensors, and not this store, which a step that is under way would keep alive.
        casts = {
            place: (self._casts[index], self._everything[index].detach())
            for index, place in trained.items()
            if index in self._casts
        }
        return LateStep(
            parts,
            owned,
            self._parameters,
            [self._views[place] for place in range(len(self._parameters))],
            finish=functools.partial(_cast_some, casts),
            settled=self._watch.note,
            reduction=self._reduction,
            device=self._device,
        )

    def _step_order(self) -> list[int]:
        """The numbers of the parts in the order in which a forward needs them."""
        return self._streaming.order()

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        yield from self._leaves.values()

    def gathered_parameters(self) -> dict[int, nn.Parameter]:
        return self._master_of

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        if is_noop_conversion(convert, self.module, self._device):
            return True
        raise RuntimeError(
            "found a prepared model that is to be moved or converted (.to(), .cpu(), .half(), ...). Its parameters "
            "are in memory that the ranks of the node share: convert the model before prepare(), or take its weights "
            "with accelerator.get_state_dict(model) and load them into another model"
        )

    # One backward

    def begin(self, synchronise: bool) -> None:
        self._late.settle()  # it reads gradients where this backward writes its own
        for leaf in self._leaves.values():
            leaf.grad = None  # of a backward of the script's own
        self._streaming.backward_begins()
        self._arriving.begin()
        self._micro_batches.begin(synchronise, goes_on=self._holds_local)
        super().begin(synchronise)
        if self._holds_local:
            # What is on the host is of the step before.
            self._fresh = [own or not self._is_on_host(index) for index, own in enumerate(self._fresh)]

    def _begin_reduction(self, waits: bool) -> None:
        # Always bounded: a script runs ahead of its device, and what waits takes the memory of that.
        self._reduction.begin(WAITING_BUCKETS, None if waits else PATIENCE_SECONDS)

    def _new_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        return self._kept.add(index, gradient, keeps=self._micro_batches.keeps)

    def _is_on_host(self, index: int) -> bool:
        """Whether earlier backwards of this step have added a parameter's gradients in host memory."""
        return index in self._sliced_pieces or self._micro_batches.are_on_host

    def _hand_in(self, number: int, pieces: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
        # Also those of parameters that only micro-batches before this one have used.
        gradients = [self._kept.take(i) if g is None else g for i, g in zip(pieces, gradients, strict=True)]
        is_slice = self._pieces[pieces[0]].rows is not None
        # Slices in every micro-batch, as a whole sum that waits would need the memory that they save.
        if is_slice or not self._micro_batches.keeps:
            super()._hand_in(number, pieces, gradients)
            return
        for index, gradient in zip(pieces, gradients, strict=True):
            if gradient is not None:
                self._kept.keep(index, gradient)
        # The ranks of the node count their backwards together.
        self._reduction.ready(number, [None] * len(pieces), [False] * len(pieces), synchronise=False)

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        self._arriving.computed_here()
        super()._take(index, parameter)
        self._streaming.gradient_came(*self._place_in_unit[index])

    def finish(self) -> None:
        self._streaming.backward_ends()
        synchronised = self._synchronise
        super().finish()
        self._micro_batches.end(synchronised)
        if synchronised:
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                parameter.grad = part_of_gradient(self._views[index], self._settle_parts)

    def _part_is_used(self) -> None:
        """Called by who needs a gradient of which there are parts only: one process alone may have it."""
        if not self._is_alone:
            raise RuntimeError(
                "found gradients in use between two micro-batches of an optimizer step, while each rank has parts of "
                "them only. Read, change or clip gradients under `if accelerator.sync_gradients:`, after the last "
                f"micro-batch, where they are those of all ranks; or use {option_advice('intra_node', 'collectives')}"
            )
        self._bring_parts()

    def _bring_parts(self) -> None:
        """Adds to the gradients in host memory what is on the device, and lets them be read."""
        parts = [p.grad for p in self._parameters if isinstance(p.grad, PartOfGradient)]
        let_go(parts)
        brought = self._kept.take_all()
        for index, view in self._views.items() if self._holds_local else ():
            if not self._is_on_host(index):
                view.zero_()
            if index in brought:
                view.add_(brought[index])
        self._micro_batches.are_on_host = True
        self._note_versions()

    def holds_gradients(self, among: Collection[int] | None = None) -> bool:
        if not self._holds_local:
            return super().holds_gradients(among)
        on_host = [(index, view) for index, view in self._views.items() if self._is_on_host(index)]
        asked = [view for index, view in on_host if among is None or id(self._parameters[index]) in among]
        return self._kept.hold_any(among) or any(bool(view.any()) for view in asked)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._micro_batches.drop()

    def _leave_no_parts(self) -> None:
        """Drops gradients that are not whole, and never will be."""
        if self._holds_local:
            self._bring_parts() if self._is_alone else self.drop_gradients()

    def state(self) -> dict[str, torch.Tensor]:
        # It decides in which order micro-batches and ranks are added.
        return {"keeps_gradients": torch.tensor(self._micro_batches.all_keep)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self._micro_batches.go_on(bool(state.get("keeps_gradients", False)))

    def cancel(self) -> None:
        self._streaming.backward_ends()
        super().cancel()

    def abandon(self) -> None:
        self._micro_batches.give_up()
        try:
            self._streaming.backward_ends()
        finally:  # other ranks of the node wait to be told
            super().abandon()

    # What changes the parameters

    def forward_begins(self) -> None:
        if not self._late.is_pending:  # else they are being changed
            super().forward_begins()

    def before_step(self, stepping: Collection[int] | None = None) -> None:
        self._late.settle()
        # The same on all ranks, so those of the node wait for each other's steps or do not.
        self._are_stepped = stepping is None or not self._ids.isdisjoint(stepping)
        if self._micro_batches.waits_for_step:
            self._others_are_stepped = stepping is None or not self._others_on_device().isdisjoint(stepping)
        if self._are_stepped and self._holds_local:
            self._part_is_used()
        if self._are_stepped:
            # Before the other ranks are told that this one is done with the parameters as they are: the device reads
            # them as long as copies are under way.
            self._stop_reading()
        super().before_step(stepping)
        if self._are_stepped:
            self._late.begins()

    def postpone_step(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [self._parameters[index] for index in self._late.postpone(optimizer)]

    def after_step(self) -> None:
        if self._others_are_stepped:
            self._micro_batches.others_stepped()
        # Not a barrier, as in memory that is computed with: each unit waits for the ranks that have stepped it.
        if self._are_stepped:
            self._samples = None
            self._late.ends(self._step_order())

    def step_is_over(self) -> None:
        self._late.is_over()

    def give_up_failed_step(self) -> None:
        self._late.settle_or_give_up()
        super().give_up_failed_step()

    def loading_begins(self, state: dict[str, Any]) -> None:
        self._stop_reading()
        super().loading_begins(state)

    def _stop_reading(self) -> None:
        self._late.settle_or_give_up()
        self._streaming.parameters_change()
        self._copies.synchronize()

    def close(self) -> None:
        try:
            self._late.settle_or_give_up()
        finally:
            super().close()

    def parameters_loaded(self) -> None:
        # All of them, by each rank: it has set them itself, and others to the same values.
        self._streaming.parameters_change()
        self._cast(self._everything, self._casts)
        super().parameters_loaded()

    @torch.no_grad()
    def _cast(self, masters: Sequence[torch.Tensor], casts: Mapping[int, torch.Tensor]) -> None:
        """Brings copies in the precision of the units up to date."""
        if casts:
            torch._foreach_copy_(list(casts.values()), [masters[index].detach() for index in casts])


@torch.no_grad()
def _cast_some(casts: Mapping[int, tuple[torch.Tensor, torch.Tensor]], indices: Sequence[int]) -> None:
    pairs = [casts[index] for index in indices if index in casts]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def _bytes_of(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.dtype.itemsize


def _refuse_gradient_of_master(parameter: torch.Tensor) -> None:
    raise RuntimeError(
        f"found a gradient for a parameter of shape {tuple(parameter.shape)} in host memory: the loss uses it outside "
        "of the forward of its module, where it is not on the device. Compute with parameters inside of the model's "
        "forward (a weight penalty: as weight_decay of the optimizer), or use strategy ddp"
    )


def _leave_apart() -> None:
    """Stands in for ``flatten_parameters`` of recurrent modules, which is an optimisation alone."""
