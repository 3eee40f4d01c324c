# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The batches that are accumulated for one optimizer step belong together: whether a script left some of them out.

A batch knows where it stands in its step. So a script that leaves out the first batches of a step would make it from a
part of them, and one that leaves out the last ones would never make it: its gradients would be added to those of
another step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from accelerate_lshdp.data.yielded_batches import TrackedBatch
    from accelerate_lshdp.engine.prepared import PreparedModel


INSIDE_WINDOW = (
    "found a training step that begins in the middle of the batches that are accumulated for it: the script has left "
    "out the first ones. Leave out a multiple of gradient_accumulation_steps batches, or use "
    "accelerator.skip_first_batches(loader, n)"
)
LEFT_OUT = (
    "found a training step of which a batch was left out, in the middle of those that are accumulated for it. Leave "
    "out whole steps, gradient_accumulation_steps batches each, or give backward 0 times the loss of such a batch"
)
LEFT_OPEN = (
    "found gradients of a training step whose last batches were left out, in a backward that begins another step: by "
    "break or continue, by next(iter(loader)) for every batch (each is the first of a step), by training one batch "
    "again and again, or by batches of two loaders in turns. Train all batches that are accumulated for a step, in "
    "one loop over one loader; or drop the gradients by model.zero_grad() where the script leaves batches out"
)

#: Blocks of `accumulate` that work on one batch for one model: two, where two losses have a block each. A script with
#: more of them means each as a batch, and waits for a step that never comes.
_MOST_BLOCKS = 2


@dataclass
class _LastStep:
    """What a model was trained on for its last step."""

    windows: set[tuple[int, int]]
    ended: bool = False
    block: int = 0
    """Of the last backward."""
    blocks: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    """In which each batch was trained."""


class AccumulationWindows:
    """Follows what is accumulated, model by model: those of one script may be trained on loaders of their own.

    A window is the batches of one rank that are accumulated for one optimizer step. What happens in one block of
    ``accumulate`` is of one step, also if it has a backward for each of several batches.
    """

    def __init__(self) -> None:
        self._steps: dict[PreparedModel, _LastStep] = {}
        self._beside: set[tuple[int, int]] = set()  # begun without a backward of their own
        # Of each window that was begun: global batch and micro-batch of what was trained or passed over, and whether
        # the global batch ends with it.
        self._reached: dict[tuple[int, int], set[tuple[int, int, bool]]] = {}
        self._block = 0

    def begin_block(self) -> None:
        """``accumulate`` begins."""
        self._block += 1

    def passed_over(self, batches: Iterable[TrackedBatch]) -> None:
        """``accumulate`` has ended without a backward, as for a loss that is NaN: these count as if theirs were 0."""
        batches = list(batches)
        self._beside = {batch.window for batch in batches}
        self._reach(batches)

    def _begun(self) -> set[tuple[int, int]]:
        return self._beside.union(*(step.windows for step in self._steps.values()))

    def _reach(self, batches: Iterable[TrackedBatch]) -> None:
        for batch in batches:
            place = batch.place
            reached = self._reached.setdefault(batch.window, set())
            reached.add((place.global_batch, place.micro_batch, place.ends_global_batch))
        begun = self._begun()
        self._reached = {window: reached for window, reached in self._reached.items() if window in begun}

    def begins_inside(self, batches: Iterable[TrackedBatch]) -> bool:
        """Whether the start of a window was left out, of which these batches are trained now."""
        begun = self._begun()
        return any(
            not batch.place.window_start and not batch.goes_on_from_earlier_pass and batch.window not in begun
            for batch in batches
        )

    def leaves_out(self, batches: Iterable[TrackedBatch]) -> bool:
        """Whether the batch before one of these was left out, in a window that was begun."""
        return any(
            not batch.place.window_start and not batch.goes_on_from_earlier_pass and not self._follows(batch)
            for batch in batches
        )

    def _follows(self, batch: TrackedBatch) -> bool:
        place = batch.place
        reached = self._reached.get(batch.window, set())
        if place.micro_batch:
            return any((number, micro) == (place.global_batch, place.micro_batch - 1) for number, micro, _ in reached)
        return any(number == place.global_batch - 1 and ends for number, _, ends in reached)

    def is_left_open(self, model: PreparedModel, batches: Sequence[TrackedBatch]) -> bool:
        """Whether the end of the window was left out that the model was trained on before these batches."""
        last = self._steps.get(model)
        if last is None or last.ended or last.block == self._block or not batches:
            return False
        if any(batch.goes_on_from_earlier_pass for batch in batches):
            return False
        if last.windows.isdisjoint(batch.window for batch in batches):
            return True
        return any(len(last.blocks.get(batch.key, set()) | {self._block}) > _MOST_BLOCKS for batch in batches)

    def trained(
        self, models: Iterable[PreparedModel], batches: Sequence[TrackedBatch], beside: Sequence[TrackedBatch]
    ) -> None:
        """A backward has added gradients to those of the models.

        Args:
            models: those that the loss depends on.
            batches: those that it is of.
            beside: those that were fetched with them.
        """
        windows = {batch.window for batch in batches}
        self._beside = {batch.window for batch in beside}
        for model in models:
            step = self._steps.get(model)
            if step is None or not (step.block == self._block or self._goes_on(step, batches)):
                step = self._steps[model] = _LastStep(set())
            step.windows |= windows
            step.block = self._block
            step.ended = step.ended or any(batch.place.window_end for batch in batches)
            for batch in batches:
                step.blocks.setdefault(batch.key, set()).add(self._block)
        self._reach([*batches, *beside])

    @staticmethod
    def _goes_on(step: _LastStep, batches: Sequence[TrackedBatch]) -> bool:
        if step.ended and any(batch.place.window_start for batch in batches):
            return False
        return any(batch.goes_on_from_earlier_pass or batch.window in step.windows for batch in batches)
