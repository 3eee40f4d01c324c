# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients that wait for the rest of their global batch: whether a script has dropped them.

A script that knows nothing of a plan takes each micro-batch for a step, and may drop gradients after it. The prepared
optimizer's ``zero_grad`` waits for the end of the step, as accelerate's does; that of the model does not, and the step
would be made with the gradients of the last micro-batch alone.
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


@dataclass(frozen=True)
class _Held:
    """What a model holds of global batches that go on.

    Args:
        global_batches: the first micro-batch of each, by pass and number.
        state: of its gradients, see `_state_of`.
    """

    global_batches: dict[tuple[int, int], int]
    state: tuple[int, int] | None


class HeldGradients:
    """Follows, model by model, gradients between the micro-batches of a global batch."""

    def __init__(self) -> None:
        self._held: dict[PreparedModel, _Held] = {}

    def are_dropped(self, model: PreparedModel, batches: Iterable[TrackedBatch]) -> bool:
        """Whether the model has lost gradients of a global batch of which a later micro-batch is trained now."""
        held = self._held.get(model)
        if held is None or not any(
            # One that is trained again from its first micro-batch on begins anew.
            batch.place.micro_batch > held.global_batches.get(_global_batch(batch), batch.place.micro_batch)
            for batch in batches
        ):
            return False
        if not model.has_gradients():
            return True
        # Gradients may be 0 by themselves; they were set to 0 only if something has changed them since. To look at all
        # of them, a host waits for its device, so whether something has is asked first.
        return _state_of(model) != held.state and not model.holds_gradients()

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


def _state_of(model: PreparedModel) -> tuple[int, int] | None:
    """Where a gradient of the model is, and how often it was changed in place; None: there is none in ``.grad``.

    One stands for all, and no tensor is kept: the script may want its memory.
    """
    gradient = next((p.grad for p in model.trainable_parameters() if p.grad is not None), None)
    if gradient is None:
        return None
    # Changes of a DTensor are counted by itself: what it does to its local tensor happens below the counting.
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.data_ptr(), gradient._version
