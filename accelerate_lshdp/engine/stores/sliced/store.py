# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Weights that all ranks share and that each operator gathers slice by slice: operator splitting of single units.

OSDP (https://arxiv.org/abs/2209.13258) splits large operators so that their gathered weights need less memory. Here a
weight stays one parameter under its own name. FSDP2, which keeps the rest of its unit, has nothing to do with it.
While a forward or a backward runs, a `SlicedTensor` stands in its place.

A slice's gradient is summed over the ranks as soon as it exists, in every micro-batch: whole gradients that wait for
the last one would need the memory that slices save.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_lshdp.engine.module_state import is_noop_conversion
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.sliced.choice import SlicedChoice
from accelerate_lshdp.engine.stores.sliced.logits import settle_logits
from accelerate_lshdp.engine.stores.sliced.order import CollectiveOrder
from accelerate_lshdp.engine.stores.sliced.stand_in import SlicedTensor
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


class SlicedStore(Store):
    """Weights that are gathered in slices; it stands beside an `Fsdp2Store`, which refuses what shards cannot do.

    Args:
        context: of the model, identical on all ranks; it is changed in place.
        chosen: the weights.
        units: modules whose forward may be called by itself, beside that of the model.
        kind: how the units of the weights are kept.
        device: where the forward runs.
        order: announces collectives of the ranks that share the weights.
    """

    loads_together = True
    can_be_closed = False  # as where FSDP2 shards
    can_be_completed = False  # ranks gather in the middle of autograd

    def __init__(
        self,
        context: StoreContext,
        chosen: Sequence[SlicedChoice],
        units: Sequence[nn.Module],
        kind: UnitKind,
        *,
        device: torch.device,
        order: CollectiveOrder,
    ) -> None:
        super().__init__(context)
        self._device = device
        self._order = order
        self._weights = [
            SlicedWeight(each.name, each.parameter, each.places, each.slices, kind=kind, device=device, order=order)
            for each in chosen
        ]
        self._trained = [weight for weight in self._weights if weight.parameter.requires_grad]
        for index, weight in enumerate(self._trained):
            weight.on_gradient = self._use_hook(index)
        self._stand_ins = {id(weight): SlicedTensor(weight) for weight in self._weights}
        self._are_replaced = False
        self._synchronise = False
        self._inside: Counter[int] = Counter()  # forwards that run, by the id of their module
        of_units = {id(module) for unit in units for module in unit.modules()}
        self._heads = [
            weight for weight in self._weights if any(id(module) not in of_units for module, _ in weight.places)
        ]
        # Their own modules, too: recomputing calls these in a backward, and not the units.
        holders = [module for weight in self._weights for module, _ in weight.places]
        for module in {id(module): module for module in (context.module, *units, *holders)}.values():
            context.attachments.add(
                # Before FSDP2's own, which passes what the module is given through a function of autograd.
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                # Before FSDP2's own, which registers hooks on outputs: logits without a loss are tensors by then.
                module.register_forward_hook(self._leave, prepend=True, always_call=True),
            )
        context.attachments.add(context.module.register_state_dict_pre_hook(self._before_state_dict))

    def _use_hook(self, index: int) -> Callable[[], None]:
        state, index = self.context.state, self.context.first + index
        return lambda: state.mark_used(index)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [weight.parameter for weight in self._trained]

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        yield from self._stand_ins.values()

    # What stands in the modules

    def _enter(self, module: nn.Module, args: tuple, keywords: dict[str, Any]) -> None:
        if self._inside[id(module)] and not _is_running(module):
            self._restore()  # an interrupted forward, which has told no hook of its end
        self._inside[id(module)] += 1
        self._replace()
        if module is self.context.module:
            for weight in self._heads:
                weight.enter_forward()
        settle_logits((args, keywords))

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        has_failed = output is None and sys.exc_info()[0] is not None
        try:
            if module._backward_hooks or module._backward_pre_hooks:
                settle_logits(output)  # the module gives its outputs to a function of autograd
            # In the forward still: what a model returns without a loss is computed as it would have been.
            if module is self.context.module and not has_failed:
                for weight in self._heads:
                    weight.settle_logits()
        finally:
            if module is self.context.module:
                for weight in self._heads:
                    weight.leave_forward()
            self._inside -= Counter([id(module)])
            if not self._inside and not self.context.state.in_backward:
                self._restore()

    def _replace(self) -> None:
        if self._are_replaced:
            return
        self._are_replaced = True
        for weight in self._weights:
            stand_in = self._stand_ins[id(weight)]
            stand_in.requires_grad_(weight.parameter.requires_grad)  # it may be frozen by now
            weight.replace(stand_in)

    def _restore(self) -> None:
        self._inside.clear()  # a forward that was interrupted has not left
        for weight in self._heads:
            weight.forget_forward()
        if self._are_replaced:
            self._are_replaced = False
            for weight in self._weights:
                weight.restore()

    def _before_state_dict(self, *_: Any) -> None:
        self._restore()

    # One backward

    def begin(self, synchronise: bool) -> None:
        self._synchronise = synchronise
        self._replace()  # for activations that are recomputed

    def deliver(self) -> None:
        return  # every rank has summed with the others, in the middle of autograd

    def finish(self) -> None:
        self._restore()
        self._order.settle()
        if self._synchronise:
            for weight in self._weights:
                weight.deliver()
        self._synchronise = False

    def cancel(self) -> None:
        self._restore()
        self._synchronise = False

    def abandon(self) -> None:
        self._restore()
        self._synchronise = False
        self._order.forget()
        self.drop_unsummed()

    # Gradients: those of micro-batches before the last one are not in .grad, as where FSDP2 shards over the world

    def has_gradients(self) -> bool:
        return any(weight.pending is not None for weight in self._weights) or super().has_gradients()

    def holds_gradients(self, among: Collection[int] | None = None) -> bool:
        pending = (weight.pending for weight in self._among(among) if weight.pending is not None)
        return any(bool(each.any()) for each in pending) or super().holds_gradients(among)

    def drop_unsummed(self, parameters: Collection[int] | None = None) -> None:
        for weight in self._among(parameters):
            weight.pending = None

    def drop_gradients(self) -> None:
        self.drop_unsummed()
        super().drop_gradients()

    def _among(self, parameters: Collection[int] | None) -> list[SlicedWeight]:
        return [weight for weight in self._weights if parameters is None or id(weight.parameter) in parameters]

    # What happens to the parameters

    def before_step(self, stepping: Collection[int] | None = None) -> None:
        self._restore()
        # Not those of other optimizers: their forwards may still have a backward to come.
        for weight in self._among(stepping):
            weight.will_change()

    def loading_begins(self, state: dict[str, Any]) -> None:
        self._restore()
        for weight in self._weights:
            weight.will_change()

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        return is_noop_conversion(convert, self.module, self._device)


def _is_running(module: nn.Module) -> bool:
    """Whether a forward of a module calls this one, whose own is about to begin."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        # The method that calls hooks and forwards: one frame a call.
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls > 1
