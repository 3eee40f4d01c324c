# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""By how much each loss of a process counts in its optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accelerate_lshdp.accelerator.losses.finding import LossFinder
from accelerate_lshdp.accelerator.plugin import LSDPPlugin
from accelerate_lshdp.data.batch_tracker import BatchTracker
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.tokens import LabelCounter
from accelerate_lshdp.data.weighting import LossWeighting, loss_share
from accelerate_lshdp.runtime.step_exchange import StepExchange


class LossShares:
    """Says by how much a loss counts: a caller does, the option ``loss_weighting``, or what was found of the loss.

    Args:
        options: with ``loss_weighting`` and ``token_counter``.
        exchange: what ranks tell each other.
        divided: whether a global batch is several micro-batches, of ranks or of one.

    Attributes:
        findings: what losses were found to be, for checkpoints: those of loops under ``loop``.
        finder: what finds it out; None: the options say it.
        token_counter: counts what losses are means over in each micro-batch, for the prepared loaders; None: nothing.
        last: the share of the last loss.
    """

    def __init__(self, options: LSDPPlugin, exchange: StepExchange, *, divided: bool) -> None:
        self._weighting = LossWeighting(options.loss_weighting)
        self._exchange = exchange
        self._given: float | None = None
        self._see: Callable[[torch.Tensor], None] | None = None
        self._window_tokens: float | None = None
        self.findings: dict[str, dict[str, Any]] = {"loop": {}}
        self.finder: LossFinder | None = None
        self.token_counter: Callable[[Any], int] | None = None
        self.last = 1.0
        if self._weighting is LossWeighting.TOKENS and options.token_counter is not None:
            self.token_counter = options.token_counter
        elif self._weighting in (LossWeighting.AUTO, LossWeighting.TOKENS):
            labels = LabelCounter(of_steps=self._weighting is LossWeighting.TOKENS)
            self.finder = LossFinder(exchange, labels, self.findings["loop"])
            if not divided and self._weighting is LossWeighting.AUTO:
                self.finder.idle = True
            else:
                self.token_counter = labels

    @contextlib.contextmanager
    def left_to_caller(self) -> Iterator[None]:
        """Inside, losses are not looked at: a caller says by how much each counts (`given`)."""
        counter, self.token_counter = self.token_counter, None
        idle = self.finder is None or self.finder.idle
        if self.finder is not None:
            self.finder.idle = True
        try:
            yield
        finally:
            self.token_counter = counter
            if self.finder is not None:
                self.finder.idle = idle

    @contextlib.contextmanager
    def given(self, share: float, see: Callable[[torch.Tensor], None] | None = None) -> Iterator[None]:
        """Inside, losses count by this share in their step, instead of that of their batch.

        Args:
            share: of each loss.
            see: called with each loss.
        """
        self._given, self._see = share, see
        try:
            yield
        finally:
            self._given = self._see = None

    def take(
        self, place: MicroBatchPlace | None, loss: torch.Tensor, tracker: BatchTracker, accumulation_steps: int
    ) -> float:
        """The share of a loss in its step; shares of all ranks are summed (collective where it is not known yet).

        Args:
            place: of its batch; None: it is of no prepared loader.
            loss: of this rank.
            tracker: what was found of the batches of the step.
            accumulation_steps: global batches of a step, for a loss of no batch.

        Raises:
            RuntimeError: on all ranks, if it depends on what the loss is a mean over and nobody can tell.
        """
        self.last = self._share(place, loss, tracker, accumulation_steps)
        return self.last

    def _share(
        self, place: MicroBatchPlace | None, loss: torch.Tensor, tracker: BatchTracker, accumulation_steps: int
    ) -> float:
        if self._given is not None:
            if self._see is not None:
                self._see(loss)
            return self._given
        if self.finder is not None and place is not None:
            return self.finder.share(place, loss)
        if self._weighting is LossWeighting.TOKENS and tracker.begins_window():
            counted = torch.tensor([float(place.window_tokens or 0)], dtype=torch.float64)
            self._window_tokens = self._exchange.sum(counted).item()
        return loss_share(
            place,
            self._weighting,
            world_size=self._exchange.world_size,
            accumulation_steps=accumulation_steps if place is None else place.accumulation_steps,
            global_window_tokens=self._window_tokens,
        )
