# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a Trainer's loss is, found by trying it on the first batch, without dropout and gradients.

transformers takes every model whose forward has ``**kwargs`` for one that divides its loss by ``num_items_in_batch``.
Heads that ignore the number then get their loss multiplied by the number of ranks, and it is not divided by the
micro-batches: so the loss for twice the number must be half as large, or the number is not given any more.

A loss that is a mean is taken of a batch and of its two halves, to see what it is a mean over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.engine.checkpoint_exchange import all_objects
from accelerate_lshdp.weighting import IGNORED_LABEL


if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

#: A first batch may fit several answers, as one whose rows all have as many labels; later ones will not.
_MOST_TRIALS = 10
#: Relative difference of losses that are taken for equal; in bf16 and fp16 a product is off by up to 1/256 and 1/2048.
_EQUAL, _EQUAL_IN_LOW_PRECISION = 1e-4, 1e-2


class Composition(Enum):
    """How the loss of a batch is made of those of its parts."""

    SAMPLES = "the mean over samples"
    LABELS = "the mean over labels"
    SHIFTED_LABELS = "the mean over labels but the first of each row"
    SUM = "the sum over samples"
    UNKNOWN = "something else"

    def count(self, batch: Any, samples: int) -> int:
        """By how much the loss of a part counts in that of the whole.

        Args:
            batch: the part.
            samples: its number of samples.
        """
        if self is Composition.SUM:
            return 1
        if self not in (Composition.LABELS, Composition.SHIFTED_LABELS):
            return samples
        labels = batch["labels"] if self is Composition.LABELS else batch["labels"][..., 1:]
        return int(labels.ne(IGNORED_LABEL).sum())


class LossTrials:
    """The trials of one Trainer's loss. All methods are collective until they have found what they look for."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._uses_count: bool | None = None
        self._found: Composition | None = None
        self._trials = 0

    def uses_count(self, batch: Mapping[str, Any], items: Any) -> bool:
        """Whether the loss is divided by the number of items that it is given; else it is not given it any more."""
        several = self._trainer.accelerator.num_processes > 1 or self._trainer.args.gradient_accumulation_steps > 1
        if self._uses_count is None and several:
            once, twice = self._losses((batch, items), (batch, 2 * items))
            answers = {
                answer for answer in all_objects(_is_divided(once, twice, self._tolerance)) if answer is not None
            }
            if answers:
                self._uses_count = True in answers
                if not self._uses_count:
                    self._take_for_mean()
        return self._uses_count is not False

    def _take_for_mean(self) -> None:
        trainer = self._trainer
        trainer.model_accepts_loss_kwargs = False
        if trainer.compute_loss_func is not None:
            trainer.loss_is_scaled_for_ga = False
        logger.warning(
            f"the loss of {type(trainer.accelerator.unwrap_model(trainer.model)).__name__} does not depend on "
            "num_items_in_batch, though the Trainer takes it for granted and would multiply it by the number of "
            "processes: it is taken for a mean over its batch, and weighted by the size of that"
        )

    def composition(self, batch: Any) -> Composition:
        """What a loss that is not divided by a number of items is made of; tried again while several answers fit."""
        if self._found is not None:
            return self._found
        plausible = self._plausible(batch)
        fitting = set.intersection(*all_objects(self._fitting(batch, plausible)))
        likeliest = next((kind for kind in plausible if kind in fitting), Composition.UNKNOWN)
        self._trials += 1
        if len(fitting) < 2 or self._trials == _MOST_TRIALS:
            self._found = likeliest
            if likeliest is Composition.UNKNOWN:
                logger.warning(
                    "the loss of a batch is neither the mean over its samples or labels nor the sum over samples. It "
                    "is weighted by samples, so unequal batches do not give exactly the gradient of the global batch"
                )
        return likeliest

    def _plausible(self, batch: Any) -> list[Composition]:
        """What the loss may be, the likeliest first."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1 and not accelerator.plan.has_accumulation:
            return [Composition.SAMPLES]
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not torch.is_tensor(labels) or labels.ndim < 2 or labels.is_floating_point():
            return [Composition.SAMPLES, Composition.SUM]
        by_labels = [Composition.LABELS, Composition.SHIFTED_LABELS]
        if self._trainer._loss_shifts_labels:
            by_labels.reverse()
        return [*by_labels, Composition.SAMPLES, Composition.SUM]

    def _fitting(self, batch: Any, plausible: list[Composition]) -> set[Composition]:
        """What the losses of the halves allow; all that is plausible if they tell nothing (collective)."""
        if len(plausible) == 1:
            return set(plausible)
        size = _batch_size(batch)
        halves = [batch] * 2 if size < 2 else [_part(batch, slice(size // 2)), _part(batch, slice(size // 2, size))]
        # Also where there are no halves: other ranks of a sharded model wait for this one's forward.
        whole, *losses = self._losses(*((part, None) for part in (batch, *halves)))
        if size < 2 or not all(map(math.isfinite, (whole, *losses))):
            return set(plausible)
        fitting = set()
        for kind in plausible:
            counts = [kind.count(part, half) for part, half in zip(halves, (size // 2, size - size // 2), strict=True)]
            expected = sum(loss * count for loss, count in zip(losses, counts, strict=True))
            if kind is not Composition.SUM:
                expected /= max(1, sum(counts))
            if abs(expected - whole) <= self._tolerance * abs(whole):
                fitting.add(kind)
        return fitting

    @property
    def _tolerance(self) -> float:
        low = (torch.bfloat16, torch.float16)
        is_low = self._trainer.accelerator.mixed_precision != "no" or any(
            parameter.dtype in low for parameter in self._trainer.model.parameters()
        )
        return _EQUAL_IN_LOW_PRECISION if is_low else _EQUAL

    @torch.no_grad()
    def _losses(self, *cases: tuple[Any, Any]) -> list[float]:
        """The losses of batches, each with the number of items that it is given."""
        trainer = self._trainer
        model = trainer.model_wrapped
        was_training = model.training
        model.eval()  # dropout would make any two losses different
        try:
            with trainer.compute_loss_context_manager():
                losses = [
                    trainer.compute_loss(model, {**trainer._prepare_inputs(batch)}, num_items_in_batch=items)
                    for batch, items in cases
                ]
        finally:
            model.train(was_training)
        return [loss.float().mean().item() for loss in losses]


def _is_divided(once: float, twice: float, tolerance: float) -> bool | None:
    """Whether the second loss is half of the first; None if they tell nothing, as losses of 0 and NaN."""
    if once == 0 or not math.isfinite(once):
        return None
    if abs(once - twice) <= tolerance * abs(once):
        return False
    if abs(once - 2 * twice) > max(tolerance, 1e-2) * abs(once):
        logger.warning_once(
            f"the loss is {once:.6g}, and {twice:.6g} for twice the number of items: only a part of it is divided by "
            "num_items_in_batch. The rest (an auxiliary loss?) counts the same on every rank, whatever its batch "
            "size, and is not exactly that of one process"
        )
    return True


def _batch_size(batch: Any) -> int:
    """0 where it is unknown: not all that has a length has the same."""
    lengths = {len(value) for value in batch.values() if _has_length(value)} if isinstance(batch, Mapping) else set()
    return lengths.pop() if len(lengths) == 1 else 0


def _has_length(value: Any) -> bool:
    return value.ndim > 0 if torch.is_tensor(value) else isinstance(value, list | tuple)


def _part(batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
    return {name: value[part] if _has_length(value) else value for name, value in batch.items()}
