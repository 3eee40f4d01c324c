# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How much the loss of each micro-batch of a Trainer counts, so that unequal batches are exact.

A Trainer's loss is one of two kinds:

* the sum over the items (tokens) of the micro-batch, divided by the number of items of the whole optimizer step on all
  ranks (``num_items_in_batch``) and multiplied by the number of ranks: causal language models and most others of
  transformers. It is already exact and counts ``1 / ranks``;
* the mean over the micro-batch, which the Trainer divides by the number of micro-batches that this rank has in the
  step. It counts by the samples of its global batch; by the labels if each sample has several (`loss_trials`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.data.labels import IGNORED_LABEL
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.trainer.loss_trials import LossTrials


if TYPE_CHECKING:
    from transformers import Trainer


class TrainerLosses:
    """The losses of one Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        findings = trainer.accelerator.session.losses.findings
        findings["trainer"] = {}  # of this training: a model that is trained later may have another loss
        self._trials = LossTrials(trainer, findings["trainer"])
        self._kind = Composition.SAMPLES
        self._label_shares: deque[float] = deque()

    def count_items(self, count: Any, batches: list[Any], places: list[MicroBatchPlace]) -> Any:
        """The ``num_items_in_batch`` of a step or of an evaluation batch; None where the loss is a mean (collective).

        Args:
            count: the Trainer's own method, from batches to the number of all ranks.
            batches: those that this rank has in the step.
            places: theirs; empty in evaluation.
        """
        known = len(batches) == len(places)
        counted = batches
        if known:  # repeated samples do not count
            counted = [b if place.samples else _without_labels(b) for b, place in zip(batches, places, strict=True)]
        items = count(counted)
        if items is not None and self._trials.uses_count(batches[0], items):
            return items
        self._label_shares.clear()
        if places and known:
            self._begin_means(batches, places)
        return None

    def _begin_means(self, batches: list[Any], places: list[MicroBatchPlace]) -> None:
        """Counts the labels of each global batch of the step on all ranks, if the loss is a mean over labels."""
        # A repeated sample cannot be halved.
        self._kind = kind = self._trials.composition(batches[0], places[0].samples or 1)
        if not kind.by_labels:
            return
        first = places[0].global_batch
        # Every rank has part of the same global batches in a step.
        totals = torch.zeros(places[-1].global_batch - first + 1, dtype=torch.float64)
        own = [kind.count(b, place.samples) if place.samples else 0 for b, place in zip(batches, places, strict=True)]
        for place, count in zip(places, own, strict=True):
            totals[place.global_batch - first] += count
        totals = self._trainer.accelerator.reduce(totals.to(self._trainer.args.device), "sum").tolist()
        for place, count in zip(places, own, strict=True):
            total = totals[place.global_batch - first]
            self._label_shares.append(place.micro_batches * count / total if total else 0.0)

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
            share = by_labels
        elif self._kind is Composition.SUM:
            share = float(place.micro_batches)
        else:
            share = place.micro_batches * place.samples / place.total_samples
        return share if self._trainer_divides else share / self._trainer.current_gradient_accumulation_steps

    @property
    def _trainer_divides(self) -> bool:
        """Whether the Trainer divides a mean by the number of micro-batches that this rank has in the step."""
        # Older ones (5.17) take every `compute_loss_func` for one that divides its loss by the number of items itself,
        # and have no attribute by which `LossTrials` could say that it does not.
        return self._trainer.compute_loss_func is None or hasattr(self._trainer, "loss_is_scaled_for_ga")


def _without_labels(batch: Any) -> Any:
    """A batch of which the Trainer counts no items; it counts none of batches that have no names, as tuples."""
    if not isinstance(batch, Mapping):
        return batch
    names = [name for name in ("labels", "shift_labels") if torch.is_tensor(batch.get(name))]
    return {**batch, **{name: torch.full_like(batch[name], IGNORED_LABEL) for name in names}}
