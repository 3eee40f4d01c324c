# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How much the loss of each micro-batch of a Trainer counts, so that unequal batches are exact.

A Trainer's loss is one of two kinds:

* the sum over the items (tokens) of the micro-batch, divided by the number of items of the whole optimizer step on all
  ranks (``num_items_in_batch``) and multiplied by the number of ranks: causal language models and most others of
  transformers. It is already exact and counts ``1 / ranks``;
* the mean over the micro-batch, divided by the number of micro-batches that this rank has in the step. It counts by
  the samples of its global batch, or by the labels if each sample has several, as in token classification.

transformers takes every model whose forward has ``**kwargs`` for the first kind. Heads that ignore the number then get
their loss multiplied by the number of ranks, and are not divided by the micro-batches. So the first batch is tried:
the loss for twice the number must be half as large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.data_places import MicroBatchPlace
from accelerate_lshdp.weighting import IGNORED_LABEL


if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

_USED, _IGNORED, _UNKNOWN = 0, 1, 2


class TrainerLosses:
    """The losses of one Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tried = False
        self._label_shares: deque[float] = deque()

    # What the Trainer counts

    def items_that_count(self, batches: list[Any], places: list[MicroBatchPlace]) -> list[Any]:
        """The batches with the labels of repeated samples ignored, for counting."""
        if len(batches) != len(places):
            return batches
        return [
            batch if place.samples else _without_labels(batch) for batch, place in zip(batches, places, strict=True)
        ]

    def begin_step(self, batches: list[Any], places: list[MicroBatchPlace]) -> None:
        """Counts the labels of the step's global batches, where the loss is a mean over them (collective).

        Every rank has part of the same global batches in a step, so all of them come here with as many.
        """
        self._label_shares.clear()
        if len(batches) != len(places) or not all(_has_several_labels(batch) for batch in batches):
            return
        first = places[0].global_batch
        own = [self._label_count(batch) if place.samples else 0 for batch, place in zip(batches, places, strict=True)]
        totals = torch.zeros(places[-1].global_batch - first + 1, dtype=torch.float64)
        for place, count in zip(places, own, strict=True):
            totals[place.global_batch - first] += count
        totals = self._trainer.accelerator.reduce(totals.to(self._trainer.args.device), "sum").tolist()
        for place, count in zip(places, own, strict=True):
            total = totals[place.global_batch - first]
            self._label_shares.append(place.micro_batches * count / total if total else 0.0)

    def _label_count(self, batch: Mapping[str, Any]) -> int:
        labels = batch["labels"][..., 1:] if self._trainer._loss_shifts_labels else batch["labels"]
        return int(labels.ne(IGNORED_LABEL).sum())

    # What a loss counts

    def share(self, place: MicroBatchPlace | None, num_items_in_batch: Any) -> float:
        """The share of the next micro-batch's loss in its step; shares are summed over ranks and micro-batches.

        Args:
            place: where the micro-batch stands; None for one of no prepared loader.
            num_items_in_batch: what the Trainer has counted; None: the loss is a mean.
        """
        by_labels = self._label_shares.popleft() if self._label_shares else None
        if place is not None and place.samples == 0:
            return 0.0
        if num_items_in_batch is not None or place is None:
            return 1.0 / self._trainer.accelerator.num_processes
        if by_labels is not None:
            return by_labels
        return place.micro_batches * place.samples / place.total_samples

    # The trial

    def uses_count(self, batches: list[Any], num_items_in_batch: Any) -> bool:
        """Whether the loss is divided by the number that it is given; tried on the first batch (collective)."""
        if not self._tried:
            found = self._trainer.accelerator.gather(self._try(batches[0], num_items_in_batch)).tolist()
            self._tried = any(kind != _UNKNOWN for kind in found)
            if _IGNORED in found and _USED not in found:
                self._take_for_mean()
                return False
        return True

    @torch.no_grad()
    def _try(self, batch: Mapping[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        trainer = self._trainer
        model = trainer.model_wrapped
        was_training = model.training
        model.eval()  # dropout would make any two losses different
        try:
            with trainer.compute_loss_context_manager():
                once, twice = (
                    trainer.compute_loss(model, {**trainer._prepare_inputs(batch)}, num_items_in_batch=items)
                    for items in (num_items_in_batch, 2 * num_items_in_batch)
                )
        finally:
            model.train(was_training)
        once, twice = once.float().mean().item(), twice.float().mean().item()
        kind = _UNKNOWN
        if abs(once) > 0 and once - once == 0:  # a loss of 0, or one that is not finite, tells nothing
            kind = _IGNORED if abs(once - twice) <= 1e-3 * abs(once) else _USED
            if kind == _USED and abs(once - 2 * twice) > 1e-2 * abs(once):
                logger.warning_once(
                    f"the loss is {once:.6g}, and {twice:.6g} for twice the number of items: only a part of it is "
                    "divided by num_items_in_batch. The rest (an auxiliary loss?) counts the same on every rank, "
                    "whatever its batch size, and is not exactly that of one process"
                )
        return torch.tensor(kind, device=trainer.args.device)

    def _take_for_mean(self) -> None:
        trainer = self._trainer
        trainer.model_accepts_loss_kwargs = False
        if trainer.compute_loss_func is not None:
            trainer.loss_is_scaled_for_ga = False
        logger.warning(
            f"the loss of {type(trainer.accelerator.unwrap_model(trainer.model)).__name__} does not depend on the "
            "num_items_in_batch that the Trainer gives it, which would multiply it by the number of processes: it is "
            "taken for a mean over its batch, and weighted by the batch size"
        )


def _has_several_labels(batch: Any) -> bool:
    """Whether a loss that is a mean is one over labels, of which each sample has its own number."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and labels.ndim > 1 and not labels.is_floating_point()


def _without_labels(batch: Any) -> Any:
    names = [name for name in ("labels", "shift_labels") if name in batch]
    ignored = {name: torch.full_like(batch[name], IGNORED_LABEL) for name in names if torch.is_tensor(batch[name])}
    return {**batch, **ignored}
