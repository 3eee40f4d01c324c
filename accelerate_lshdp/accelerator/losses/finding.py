# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the losses of a script are means over, found out in the first backwards of its loop.

A loss is given to ``backward`` as a number. Its rank compares it with what it would be as the mean over labels, over
samples, ... of the logits of its forward (`values`); the answer is the one that holds on all ranks. Where there
are no such logits, but the loss is the model's own, the model's class says it.

The shares are those of one process: a mean over labels is one over the labels of the *global batch*, and the global
batches of a script's own accumulation count the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.losses.forwards import Forward, ForwardWatch, operation_of
from accelerate_lshdp.accelerator.losses.notices import (
    refuse_uneven_labels,
    require_known_labels_of_step,
    tell_kind,
    tell_undecided,
)
from accelerate_lshdp.accelerator.losses.observations import SeenLoss, fitting_kinds, is_own, kind_of
from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.accelerator.losses.reports import MOST_LOSSES, LossReports
from accelerate_lshdp.accelerator.losses.undecided import OpenLoss
from accelerate_lshdp.data.labels import LabelCounts
from accelerate_lshdp.data.tokens import LabelCounter
from accelerate_lshdp.data.weighting import LossWeighting, loss_share
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.option_advice import option_advice


if TYPE_CHECKING:
    from accelerate_lshdp.data.place import MicroBatchPlace
    from accelerate_lshdp.runtime.shared_rows import PendingRows
from accelerate_lshdp.runtime.step_exchange import StepExchange


logger = get_logger(__name__)

ANOTHER_LOSS = (
    "found a loss in a later micro-batch of a step that is another one than that of its first micro-batch, which the "
    "others may not have, so they cannot be asked what it is. Let all micro-batches of a step have the same losses, "
    f"or say what they are means over with {option_advice('loss_weighting', 'sample')}, 'tokens' or 'none'"
)


class _Answer(NamedTuple):
    """By what a loss counts in those micro-batches that are counted together."""

    place: MicroBatchPlace
    """Where it was found."""
    together: tuple[int, int]
    """Which micro-batches these are."""
    kind: Composition
    totals: LabelCounts | None
    """Their labels; None: not all have labels that can be counted, or it does not count by these."""
    agreed: bool
    """Whether any rank has seen a loss that is a number, or knows what it is."""


class LossFinder:
    """Says by how much each loss counts in its step, as it was found to be.

    Losses are told apart by what can be seen of them on all ranks: their order among those of one batch, the class of
    the model that they come from, the operation that made them, and whether samples have several labels.

    Every rank tells the others of each loss that it may have to look at, whether it knows it or not. The ranks that
    know theirs do not wait; they see before the end of the backward whether others have asked them in vain.

    Args:
        exchange: what ranks tell each other.
        counter: counts labels in the prepared loaders.
        findings: names of compositions, for JSON: filled here, and by a checkpoint that the run goes on from.
    """

    def __init__(self, exchange: StepExchange, counter: LabelCounter, findings: dict[str, Any]) -> None:
        self._exchange = exchange
        self._counter = counter
        self._findings = findings
        self._forwards = ForwardWatch()
        self._reports = LossReports(exchange, counter, self._forwards)
        self._place: MicroBatchPlace | None = None
        self._order = 0  # of the loss among those of its batch
        self._names: dict[str, str] = {}  # by what is seen of a loss
        self._looks = ""  # what is seen of the last one
        self._open: dict[str, OpenLoss] = {}
        self._answers: dict[str, _Answer] = {}
        self._answers_by_order: dict[int, _Answer] = {}
        self._shown_early: tuple[MicroBatchPlace, PendingRows] | None = None
        self.problem: str | None = None
        """What makes the step wrong on this rank; the caller takes it, for ranks to tell each other."""
        self.by_labels = False
        """Whether the last loss counted by its labels."""
        exchange.make_loss_rows()

    @property
    def idle(self) -> bool:
        """Whether somebody else says by how much losses count, or they can count in one way only."""
        return self._forwards.idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        self._forwards.idle = idle

    def watch(self, prepared: PreparedModel) -> None:
        """Looks at the forwards of a model, until it is closed."""
        self._forwards.watch(prepared)

    # Shares

    def look_before_meeting(self, place: MicroBatchPlace) -> None:
        """Does this rank's part of looking at the first loss of a micro-batch, of which there is no loss yet.

        Where ranks have different numbers of micro-batches, one calls a collective before its only backward that
        others reach in their last micro-batch. They have to get past their first one before.
        """
        early = self._shown_early is not None and self._shown_early[0] is place
        if not self.idle and place is not self._place and not early and self._starts(place):
            # Of a forward of this micro-batch, or of none: those of the batches before were used.
            seen = self._reports.see(place, 0, self._forwards.of(None, place), None, self._looks)
            self._shown_early = place, self._reports.tell(seen)

    def share(self, place: MicroBatchPlace, loss: torch.Tensor) -> float:
        """The share of a loss in its step (collective where it is not known yet what the loss is).

        Raises:
            RuntimeError: on all ranks, if it depends on what the loss is a mean over and nobody can tell.
        """
        if self.idle:
            return _share_of_samples(place)
        self._order = min(self._order + 1, MOST_LOSSES) if place is self._place else 0
        self._place = place
        forward = self._forwards.of(loss, place)
        name = self._name_of(place, forward, loss)
        answer = self._answer(name, place, forward, loss)
        if forward is not None:
            self._forwards.used(forward, place, keep=bool(self._open))
        kind, totals = answer.kind, answer.totals
        self.by_labels = kind.by_labels and totals is not None
        if self.by_labels:
            own, total = (_count(kind, counts) for counts in (self._reports.own_labels(place), totals))
            part = own / total if own else 0.0
            return part if self._counter.of_steps else part / place.accumulation_steps
        if place.samples == 0:
            return 0.0
        if kind is Composition.SUM:
            return 1.0 / place.accumulation_steps
        if kind is Composition.GLOBAL:
            weighting = LossWeighting.NONE
            counts = {"world_size": self._exchange.world_size, "accumulation_steps": place.accumulation_steps}
            return loss_share(place, weighting, **counts)
        return _share_of_samples(place)

    def require_same_looks(self) -> None:
        """Waits until all ranks have said what they know of the losses of this step.

        Raises:
            RuntimeError: on all ranks, if one of them has a loss that others have not.
        """
        self._reports.require_same_looks()

    def _name_of(self, place: MicroBatchPlace, forward: Forward | None, loss: torch.Tensor) -> str:
        labels = forward.labels if forward is not None else None
        if labels is None and place.labels is not None:
            labels = place.labels.values
        several = labels is not None and labels.ndim > 1
        model = "no model" if forward is None else forward.name
        of = "several labels a sample" if several else "a label a sample, or none"
        seen = self._looks = f"number {self._order} of its batch, {operation_of(loss)}, {model}, {of}"
        for name, found in self._findings.items():
            if found["seen"] == seen:
                self._open.pop(self._names.pop(seen, ""), None)
                return name
        if self._names.get(seen) in self._findings:  # a checkpoint that was loaded has another one of this name
            self._open.pop(self._names.pop(seen), None)
        if seen not in self._names:
            taken = {*self._findings, *self._names.values()}
            self._names[seen] = next(f"loss {n}" for n in range(len(taken) + 1) if f"loss {n}" not in taken)
        return self._names[seen]

    # Answers

    def _starts(self, place: MicroBatchPlace) -> bool:
        return place.window_start if self._counter.of_steps else place.micro_batch == 0

    def _answer(self, name: str, place: MicroBatchPlace, forward: Forward | None, loss: torch.Tensor) -> _Answer:
        """Looks at the first loss of those micro-batches that are counted together, whichever that is.

        The script may have left out the loss of the first one, on all ranks (a loss that is NaN).
        """
        known = self._answers.get(name)
        if known is not None and known.together == self._reports.counted_together(place):
            again = self._starts(place) and known.place is not place
            # Where all losses of the first one were NaN, a later one may tell, if all ranks have as many.
            unclear = not known.agreed and known.place is not place and name not in self._findings
            if not again and not (unclear and self._exchange.counts is None):
                return known
        if not self._starts(place):
            first = self._answers_by_order.get(self._order)
            follows = first is not None and first.together == self._reports.counted_together(place)
            if follows and self._exchange.counts is None and self._exchange.world_size > 1 and first.agreed:
                # Others may have the loss of the first one here, too, and not look: where none of this rank's samples
                # counts, say, its loss is made by another operation.
                if not self._may_be(first.kind, name, place, forward, loss):
                    self.problem = self.problem or ANOTHER_LOSS
                return first
            if self._exchange.counts is not None and not follows:
                raise RuntimeError(
                    "found a loss that the first micro-batch of its step does not have. The plan gives ranks "
                    "different numbers of micro-batches, so the others cannot be asked what it is: say what losses "
                    "are means over with LSDPPlugin(loss_weighting=...), or LSDP_LOSS_WEIGHTING in the environment"
                )
            if self._exchange.counts is not None:
                return first
        answer = self._look(name, place, forward, loss)
        self._answers[name] = self._answers_by_order[self._order] = answer
        return answer

    def _may_be(
        self, kind: Composition, name: str, place: MicroBatchPlace, forward: Forward | None, loss: torch.Tensor
    ) -> bool:
        """Whether a loss may be what that of its step's first micro-batch is, as far as this rank alone can see."""
        found = self._findings.get(name)
        if found is not None:
            return Composition[found["composition"]] is kind
        seen = self._reports.try_to_see(place, self._order, forward, loss, self._looks)
        fitting = fitting_kinds([seen], {1.0, 1.0 / place.accumulation_steps}) if seen.compared else set()
        if fitting:
            return kind in fitting
        # A loss that nothing is known of counts by samples.
        return seen.loss == 0 or kind in (Composition.SAMPLES, Composition.UNKNOWN)

    def _look(self, name: str, place: MicroBatchPlace, forward: Forward | None, loss: torch.Tensor) -> _Answer:
        """Finds what the loss is and how many labels it is over, as far as these are not known."""
        found = self._findings.get(name)
        self._counter.wanted = found is None or found["counts"] or bool(self._open)
        opened = None
        if found is None:
            opened = self._open.setdefault(
                name, OpenLoss(by_labels=self._counter.of_steps, world_size=self._exchange.world_size)
            )
        values = opened is not None and opened.wants_values(place)
        known = Composition[found["composition"]] if found is not None else None if values else opened.guess
        asks = values or known is None or known.by_labels or (found is not None and found["counts"])
        if asks and self._order and self._exchange.counts is not None and not place.window_end:
            # A rank with fewer of them may be in the backward of its first loss, which waits for this one's last one.
            self._exchange.announce("a second loss that is not known yet", True).require_all()
        early, self._shown_early = self._shown_early, None
        if early is not None and early[0] is place and self._order == 0:
            telling = early[1]
            self._reports.require_same_labels(place, forward)
        else:
            seen = self._reports.see(
                place, self._order, forward, loss, self._looks, asks=asks, known=known, values=values
            )
            telling = self._reports.tell(seen)
        if not asks:
            self._reports.hear_later(telling)
            return _Answer(place, self._reports.counted_together(place), known, None, True)
        everyone = self._reports.hear(telling)
        totals = None
        if all(seen.counted for seen in everyone):
            columns = zip(*((s.samples, s.labels, s.shifted, s.ignored) for s in everyone), strict=True)
            totals = LabelCounts(*(int(sum(column)) for column in columns))
        own = everyone[self._exchange.rank]
        alike = [seen for seen in everyone if seen.looks == own.looks]
        elsewhere = next((kind_of(seen.known) for seen in (*alike, *everyone) if seen.known >= 0), None)
        tells = any(seen.tells for seen in everyone)
        agreed = tells or any(seen.known >= 0 for seen in everyone)  # the same on all ranks
        kind = known or elsewhere
        if opened is not None and (kind is None or values):
            kind = self._find(name, opened, everyone, place) if elsewhere is None else elsewhere
            if any(seen.known >= 0 for seen in alike):  # another rank has found it while this one had another
                opened.guess = kind
                self._settle(name, opened, everyone)
        require_known_labels_of_step(kind, totals, everyone)
        if kind is Composition.UNKNOWN and (tells or found is not None) and not is_own(everyone):
            refuse_uneven_labels(everyone)
        return _Answer(place, self._reports.counted_together(place), kind, totals, agreed)

    def _find(self, name: str, opened: OpenLoss, everyone: list[SeenLoss], place: MicroBatchPlace) -> Composition:
        kind, clear = opened.look(everyone, place)
        if clear:
            self._settle(name, opened, everyone)
        elif not opened.warned_undecided and tell_undecided(name, opened, everyone):
            opened.warned_undecided = True
        return kind

    def _settle(self, name: str, opened: OpenLoss, everyone: list[SeenLoss]) -> None:
        kind = opened.guess
        # An unknown loss is watched: labels of which ranks have different shares show only later.
        watched = kind is Composition.UNKNOWN and everyone[0].dimensions > 1 and not is_own(everyone)
        counts = all(seen.counted for seen in everyone) and (kind.by_labels or watched)
        seen = next(seen for seen, known in self._names.items() if known == name)
        self._findings[name] = {"composition": kind.name, "counts": counts, "seen": seen}
        del self._open[name], self._names[seen]
        self._counter.wanted = bool(self._open) or any(found["counts"] for found in self._findings.values())
        tell_kind(name, opened, everyone)


def _share_of_samples(place: MicroBatchPlace) -> float:
    return place.samples / (place.total_samples * place.accumulation_steps)


def _count(kind: Composition, counts: LabelCounts) -> int:
    return counts.shifted if kind is Composition.SHIFTED_LABELS else counts.labels
