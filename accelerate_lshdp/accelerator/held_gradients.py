# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients that wait for the rest of their global batch: whether a script has dropped or changed them.

A script that knows nothing of a plan takes each micro-batch for a step, and may drop gradients after it. The prepared
optimizer's ``zero_grad`` waits for the end of the step, as accelerate's does; that of the model does not, and the step
would be made with the gradients of the last micro-batch alone. Likewise torch's own ``clip_grad_norm_``: it would clip
each part of a gradient instead of their sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from accelerate_lshdp.accelerator.unstepped_gradients import parameters_of
from accelerate_lshdp.documents.value_checks import LARGEST_BATCH


if TYPE_CHECKING:
    import torch

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
    "found gradients that were changed between two micro-batches of an optimizer step, as torch's own clip_grad_norm_ "
    "changes them, while each rank had parts of them only. Change or clip gradients under `if "
    "accelerator.sync_gradients:`, after the last micro-batch, where they are those of all ranks"
)

#: Of each gradient, None where a parameter has none: its address (0 of a DTensor) and its number of changes in place.
_State = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class _Held:
    """What a model holds of global batches, until its optimizer steps.

    Args:
        first: the first micro-batch of each that it was trained on, by pass and number.
        windows: optimizer steps that these belong to.
        is_whole: whether they are whole gradients of global batches, summed over ranks: then they may be changed.
        state: of its gradients after the last backward that has added to them, see `_state_of`.
    """

    first: dict[tuple[int, int], int]
    windows: set[tuple[int, int]]
    is_whole: bool
    state: _State


class HeldGradients:
    """Follows, model by model, gradients between the micro-batches of a global batch, and of an optimizer step."""

    def __init__(self) -> None:
        self._held: dict[PreparedModel, _Held] = {}

    def find_problem(self, model: PreparedModel, batches: Sequence[TrackedBatch]) -> str | None:
        """What the script has done to gradients that a backward of these batches is about to be added to.

        Returns:
            `DROPPED`: those of an earlier micro-batch of the same global batch; `CHANGED`: those, or of an earlier
            global batch of the same step, while each rank has its own; or None.
        """
        held = self._held.get(model)
        if held is None:
            return None
        # One that is trained again from its first micro-batch on begins anew.
        goes_on = any(
            batch.place.micro_batch > held.first.get(_global_batch(batch), batch.place.micro_batch)
            for batch in batches
        )
        if not goes_on and held.windows.isdisjoint(batch.window for batch in batches):
            return None
        if not model.has_gradients():
            return DROPPED if goes_on else None
        # Whether gradients are 0 costs a host the wait for its device, so their counters of changes are asked first.
        if _state_of(model) == held.state:
            return None
        if not model.holds_gradients():
            return DROPPED if goes_on else None
        return None if held.is_whole else CHANGED

    def added(self, models: Iterable[PreparedModel], batches: Sequence[TrackedBatch], *, is_alone: bool) -> None:
        """Takes in that a backward of these batches has added gradients to those of the models.

        Args:
            models: that the loss depends on.
            batches: that it is of.
            is_alone: there are no other ranks, so that only micro-batches of a global batch make parts of gradients.
        """
        windows = {batch.window for batch in batches if not batch.place.window_end}
        are_parts = bool(windows) or any(batch.place.micro_batches > 1 for batch in batches)
        is_whole = all(batch.place.ends_global_batch for batch in batches)
        for model in models:
            before = self._held.pop(model, None)
            if not are_parts:
                continue
            known = {} if before is None else before.first
            first = {
                _global_batch(batch): min(batch.place.micro_batch, known.get(_global_batch(batch), LARGEST_BATCH))
                for batch in batches
            }
            is_summed = is_alone or not model.local.held
            self._held[model] = _Held(first, windows, is_whole and is_summed, _state_of(model))

    def reached(self, models: Iterable[PreparedModel]) -> None:
        """Takes in that a backward has added to the gradients of models that its batches are not accumulated for."""
        for model in models:
            if model in self._held:
                self._held[model] = replace(self._held[model], state=_state_of(model))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has used, or skipped, the gradients of its parameters."""
        if not self._held:
            return
        updated = parameters_of([optimizer])
        for model in list(self._held):
            if any(id(parameter) in updated for parameter in model.trainable_parameters()):
                del self._held[model]


def refuse_to_clip_parts(models: Iterable[PreparedModel], parameters: Iterable[torch.Tensor]) -> None:
    """Refuses to clip gradients that ranks have not summed, but where each rank steps by itself, inside ``no_sync``.

    Args:
        models: that are prepared.
        parameters: whose gradients are to be clipped, as the optimizer has them.

    Raises:
        RuntimeError: on all ranks, as all of them accumulate alike.
    """
    given = {id(parameter) for parameter in parameters}
    for model in models:
        is_given = any(id(parameter) in given for parameter in model.trainable_parameters())
        if is_given and model.local.held and not model.within_no_sync:
            raise RuntimeError(
                "found clip_grad_norm_ or clip_grad_value_ in the middle of an optimizer step, where each rank has "
                "the gradients of its own batches only: to clip these is not to clip their sum. Clip under `if "
                "accelerator.sync_gradients:`, after the last batch of the step"
            )


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
