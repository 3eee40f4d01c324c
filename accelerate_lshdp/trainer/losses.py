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
        self._shares: deque[float] = deque()  # of the micro-batches of the step that are still to come

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
        self._shares.clear()
        if places and known:
            self._begin_means(batches, places)
        return None

    def _begin_means(self, batches: list[Any], places: list[MicroBatchPlace]) -> None:
        """Finds the shares of a step's losses, which are means or sums over their batches (collective)."""
        first = places[0].global_batch
        numbers = [place.global_batch - first for place in places]
        # A repeated sample cannot be halved.
        kinds = self._trials.compositions(batches, [place.samples or 1 for place in places], numbers)
        counts = [
            kind.count(batch, place.samples) if kind.by_labels and place.samples else 0
            for kind, batch, place in zip(kinds, batches, places, strict=True)
        ]
        totals = [0.0] * (numbers[-1] + 1)
        if self._trials.may_count_labels:
            # Every rank has part of the same global batches in a step.
            own = torch.zeros(len(totals), dtype=torch.float64)
            for number, count in zip(numbers, counts, strict=True):
                own[number] += count
            totals = self._trainer.accelerator.reduce(own.to(self._trainer.args.device), "sum").tolist()
        for kind, place, number, count in zip(kinds, places, numbers, counts, strict=True):
            total = totals[number] if kind.by_labels else place.total_samples
            if kind is Composition.SUM:
                share = float(place.micro_batches) if place.samples else 0.0
            else:
                share = place.micro_batches * (count if kind.by_labels else place.samples) / total if total else 0.0
            self._shares.append(share)

    def share(self, place: MicroBatchPlace | None, num_items_in_batch: Any) -> float:
        """The share of the next micro-batch's loss in its step; shares are summed over ranks and micro-batches.

        Args:
            place: where the micro-batch stands; None for one of no prepared loader.
            num_items_in_batch: what the Trainer has counted; None: the loss is a mean.
        """
        self._trials.micro_batch_begins()
        found = self._shares.popleft() if self._shares else None
        if place is not None and place.samples == 0:
            return 0.0
        if num_items_in_batch is not None or place is None:
            return 1.0 / self._trainer.accelerator.num_processes
        share = place.micro_batches * place.samples / place.total_samples if found is None else found
        return share if self._trainer_divides else share / self._trainer.current_gradient_accumulation_steps

    def see(self, loss: torch.Tensor) -> None:
        """Takes note of the loss of the micro-batch that `share` was asked for last."""
        self._trials.see(loss)

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
