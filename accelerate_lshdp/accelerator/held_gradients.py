# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients that wait for the rest of their global batch: whether a script has dropped or changed them.

A script that knows nothing of a plan takes each micro-batch for a step, and may drop gradients after it. The prepared
optimizer's ``zero_grad`` waits for the end of the step, as accelerate's does; that of the model does not, and the step
would be made with the gradients of the last micro-batch alone. Likewise torch's own ``clip_grad_norm_``: it would clip
each part of a gradient instead of their sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor


if TYPE_CHECKING:
    from accelerate_lshdp.data.yielded_batches import TrackedBatch
    from accelerate_lshdp.engine.prepared import PreparedModel


DROPPED = (
    "found gradients that were dropped between two micro-batches of a global batch, by zero_grad() of a model or by "
    "setting them to None or 0: the plan divides global batches into several micro-batches, so the step would be made "
    "without the first ones. Call zero_grad() of the optimizer that prepare() returned, which waits for the step, or "
    "drop them under `if accelerator.sync_gradients:`; or make a plan without accumulation (accelerate-lshdp plan "
    "--no-accumulation)"
)

CHANGED = (
    "found gradients that were changed between two micro-batches of a global batch, as torch's own clip_grad_norm_ "
    "changes them: the plan divides global batches into several micro-batches, so these were parts of the gradient. "
    "Call accelerator.clip_grad_norm_ or clip_grad_value_, which wait for the last one; or change gradients under `if "
    "accelerator.sync_gradients:`; or make a plan without accumulation (accelerate-lshdp plan --no-accumulation)"
)

#: Of each gradient, None where a parameter has none: its address (0 of a DTensor) and its number of changes in place.
_State = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class _Held:
    """What a model holds of global batches that go on.

    Args:
        global_batches: the first micro-batch of each, by pass and number.
        state: of its gradients after the last backward that has added to them, see `_state_of`.
    """

    global_batches: dict[tuple[int, int], int]
    state: _State


class HeldGradients:
    """Follows, model by model, gradients between the micro-batches of a global batch."""

    def __init__(self) -> None:
        self._held: dict[PreparedModel, _Held] = {}

    def find_problem(self, model: PreparedModel, batches: Iterable[TrackedBatch]) -> str | None:
        """What the script has done to gradients of a global batch of which a later micro-batch is trained now.

        Returns:
            `DROPPED`, `CHANGED`, or None: they are as the last backward has left them.
        """
        held = self._held.get(model)
        if held is None or not any(
            # One that is trained again from its first micro-batch on begins anew.
            batch.place.micro_batch > held.global_batches.get(_global_batch(batch), batch.place.micro_batch)
            for batch in batches
        ):
            return None
        if not model.has_gradients():
            return DROPPED
        # Whether gradients are 0 costs a host the wait for its device, so their counters of changes are asked first.
        if _state_of(model) == held.state:
            return None
        return CHANGED if model.holds_gradients() else DROPPED

    def added(self, models: Iterable[PreparedModel], batches: Sequence[TrackedBatch]) -> None:
        """Takes in that a backward of these batches has added gradients to those of the models."""
        going_on = {
            _global_batch(batch): batch.place.micro_batch
            for batch in sorted(batches, key=lambda batch: -batch.place.micro_batch)
            if not batch.place.ends_global_batch
        }
        for model in models:
            self._held.pop(model, None)
            if going_on:
                self._held[model] = _Held(going_on, _state_of(model))


def _global_batch(batch: TrackedBatch) -> tuple[int, int]:
    return batch.pass_number, batch.place.global_batch


def _state_of(model: PreparedModel) -> _State:
    """Where the model's gradients in ``.grad`` are, and how often each was changed in place; keeps none alive."""
    # Changes of a DTensor are counted by itself: what it does to its local tensor happens below the counting. Its
    # local tensor is not asked for: that takes longer than all else here.
    return tuple(
        None
        if (gradient := parameter.grad) is None
        else (0 if isinstance(gradient, DTensor) else gradient.data_ptr(), gradient._version)
        for parameter in model.trainable_parameters()
    )
