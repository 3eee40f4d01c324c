# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Weights that all ranks share and that each operator gathers slice by slice: operator splitting of single units.

OSDP (https://arxiv.org/abs/2209.13258) splits large operators so that their gathered weights need less memory. Here a
weight stays one parameter under its own name. FSDP2, which keeps the rest of its unit, has nothing to do with it.
While a forward or a backward runs, a `SlicedTensor` stands in its place.

A slice's gradient is summed over the ranks as soon as it exists, in every micro-batch: whole gradients that wait for
the last one would need the memory that slices save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_lshdp.engine.module_state import is_noop_conversion
from accelerate_lshdp.engine.store import Store, StoreContext
from accelerate_lshdp.engine.stores.fsdp2.kind import UnitKind
from accelerate_lshdp.engine.stores.sliced.choice import SlicedChoice
from accelerate_lshdp.engine.stores.sliced.order import CollectiveOrder
from accelerate_lshdp.engine.stores.sliced.sharded import ShardedWeight
from accelerate_lshdp.engine.stores.sliced.stand_ins import StandIns


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
            ShardedWeight(each.name, each.parameter, each.places, each.slices, kind=kind, device=device, order=order)
            for each in chosen
        ]
        self._trained = [weight for weight in self._weights if weight.parameter.requires_grad]
        for index, weight in enumerate(self._trained):
            weight.on_gradient = self._use_hook(index)
        self._synchronise = False
        self._stand_ins = StandIns(context, self._weights, units)

    def _use_hook(self, index: int) -> Callable[[], None]:
        state, index = self.context.state, self.context.first + index
        return lambda: state.mark_used(index)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [weight.parameter for weight in self._trained]

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        yield from self._stand_ins.of

    # One backward

    def begin(self, synchronise: bool) -> None:
        self._synchronise = synchronise
        self._stand_ins.replace()  # for activations that are recomputed

    def deliver(self) -> None:
        return  # every rank has summed with the others, in the middle of autograd

    def finish(self) -> None:
        self._stand_ins.restore()
        self._order.settle()
        if self._synchronise:
            for weight in self._weights:
                weight.deliver()
        self._synchronise = False

    def cancel(self) -> None:
        self._stand_ins.restore()
        self._synchronise = False

    def abandon(self) -> None:
        self._stand_ins.restore()
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

    def _among(self, parameters: Collection[int] | None) -> list[ShardedWeight]:
        return [weight for weight in self._weights if parameters is None or id(weight.parameter) in parameters]

    # What happens to the parameters

    def before_step(self, stepping: Collection[int] | None = None) -> None:
        self._stand_ins.restore()
        # Not those of other optimizers: their forwards may still have a backward to come.
        for weight in self._among(stepping):
            weight.will_change()

    def loading_begins(self, state: dict[str, Any]) -> None:
        self._stand_ins.restore()
        for weight in self._weights:
            weight.will_change()

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        return is_noop_conversion(convert, self.module, self._device)
