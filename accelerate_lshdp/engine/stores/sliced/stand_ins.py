# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`StandIns`: puts stand-ins in the place of weights in slices while a forward or a backward of their model runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from accelerate_lshdp.engine.store import StoreContext
from accelerate_lshdp.engine.stores.sliced.logits import settle_logits
from accelerate_lshdp.engine.stores.sliced.stand_in import SlicedTensor
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


class StandIns:
    """The stand-ins of a model's weights in slices.

    Args:
        context: of the model.
        weights: in slices.
        units: modules whose forward may be called by itself, beside that of the model.

    Attributes:
        of: the stand-in of each weight, in their order.
    """

    def __init__(self, context: StoreContext, weights: Sequence[SlicedWeight], units: Sequence[nn.Module]) -> None:
        self._context = context
        self._weights = list(weights)
        self.of = [SlicedTensor(weight) for weight in self._weights]
        self._are_replaced = False
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

    def _enter(self, module: nn.Module, args: tuple, keywords: dict[str, Any]) -> None:
        if self._inside[id(module)] and not _is_running(module):
            self.restore()  # an interrupted forward, which has told no hook of its end
        self._inside[id(module)] += 1
        self.replace()
        if module is self._context.module:
            for weight in self._heads:
                weight.enter_forward()
        settle_logits((args, keywords))

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        has_failed = output is None and sys.exc_info()[0] is not None
        try:
            if module._backward_hooks or module._backward_pre_hooks:
                settle_logits(output)  # the module gives its outputs to a function of autograd
            # In the forward still: what a model returns without a loss is computed as it would have been.
            if module is self._context.module and not has_failed:
                for weight in self._heads:
                    weight.settle_logits()
        finally:
            if module is self._context.module:
                for weight in self._heads:
                    weight.leave_forward()
            self._inside -= Counter([id(module)])
            if not self._inside and not self._context.state.in_backward:
                self.restore()

    def replace(self) -> None:
        """Puts the stand-ins into the modules."""
        if self._are_replaced:
            return
        self._are_replaced = True
        for weight, stand_in in zip(self._weights, self.of, strict=True):
            stand_in.requires_grad_(weight.parameter.requires_grad)  # it may be frozen by now
            weight.replace(stand_in)

    def restore(self) -> None:
        """Registers the parameters again."""
        self._inside.clear()  # a forward that was interrupted has not left
        for weight in self._heads:
            weight.forget_forward()
        if self._are_replaced:
            self._are_replaced = False
            for weight in self._weights:
                weight.restore()

    def _before_state_dict(self, *_: Any) -> None:
        self.restore()


def _is_running(module: nn.Module) -> bool:
    """Whether a forward of a module calls this one, whose own is about to begin."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        # The method that calls hooks and forwards: one frame a call.
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls > 1
