# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a rank sees of its losses, and what ranks tell each other of them."""

from __future__ import annotations

import math
import zlib

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.losses.forwards import Forward, ForwardWatch, factor_of
from accelerate_lshdp.accelerator.losses.notices import refuse_different_kinds, refuse_unequal_looks
from accelerate_lshdp.accelerator.losses.observations import SeenLoss, number_of
from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.accelerator.losses.telling import ranks_with_values, seen_losses, told
from accelerate_lshdp.accelerator.losses.values import CrossEntropies, cross_entropies, cross_entropies_of_rows
from accelerate_lshdp.data.labels import LabelCounts
from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.tokens import LabelCounter
from accelerate_lshdp.runtime.shared_rows import PendingRows
from accelerate_lshdp.runtime.step_exchange import StepExchange


logger = get_logger(__name__)

#: Losses of one batch that are told apart. More are of a script that trains on one batch again and again.
MOST_LOSSES = 3
#: What ranks have told each other and nobody has waited for.
_MOST_UNHEARD = 64


class LossReports:
    """What this rank sees of each loss, told to the others in the order of losses.

    Args:
        exchange: how ranks tell each other.
        counter: counts labels in the prepared loaders.
        forwards: those that losses may be of.
    """

    def __init__(self, exchange: StepExchange, counter: LabelCounter, forwards: ForwardWatch) -> None:
        self._exchange = exchange
        self._counter = counter
        self._forwards = forwards
        self._unheard: list[PendingRows] = []  # what others told while this rank knew enough
        self._given: tuple[MicroBatchPlace, LabelCounts] | None = None  # labels that are not those of the batch

    def counted_together(self, place: MicroBatchPlace) -> tuple[int, int]:
        """Which micro-batches are counted together with one: those of its global batch, or of its step."""
        return place.epoch, place.window if self._counter.of_steps else place.global_batch

    def own_labels(self, place: MicroBatchPlace) -> LabelCounts:
        """This micro-batch's labels: of the batch, or what the model was given in their place."""
        if self._given is not None and self._given[0] is place:
            return self._given[1]
        return place.labels.own

    def require_same_labels(self, place: MicroBatchPlace, forward: Forward | None) -> None:
        """Refuses labels that others were told other counts of, before the forward was made."""
        if forward is None or forward.labels is None or place.labels is None or self._given is not None:
            return
        if LabelCounts.of(forward.labels, place.samples) != place.labels.own:
            raise RuntimeError(
                "found a forward with other labels than batch['labels'] after a collective in its micro-batch: the "
                "plan gives ranks different numbers of micro-batches, so the others have counted those of the batch. "
                "Put the labels that the model is given into the batches (in the collator)"
            )

    def see(
        self,
        place: MicroBatchPlace,
        order: int,
        forward: Forward | None,
        loss: torch.Tensor | None,
        looks: str,
        *,
        asks: bool = False,
        known: Composition | None = None,
        values: bool = False,
    ) -> SeenLoss:
        """What this rank sees of a loss.

        Args:
            place: of its batch.
            order: of the loss among those of its batch.
            forward: that it is of; None: it is not known.
            loss: None: there is none yet.
            looks: what can be seen of it on all ranks, as text.
            asks: whether this rank has to know what others see.
            known: what it is known to be.
            values: whether to compare it with what it may be, for which the device is waited for.
        """
        of_batch = place.labels
        labels = of_batch.values if of_batch is not None else None
        together = of_batch.together if of_batch is not None else ()
        self._given = None
        if forward is not None and forward.labels is not None and (asks or loss is None):
            labels = forward.labels
            own = LabelCounts.of(labels, place.samples)
            alone = place.window_start and place.window_end if self._counter.of_steps else place.micro_batches == 1
            if (of_batch is None or own != of_batch.own) and (alone or not self._counter.of_steps):
                # Those of the micro-batches that follow are not known yet.
                together = (own,) if alone else ()
                self._given = place, own
        total = sum(together, LabelCounts())
        number = own_loss = multiple = items = auxiliary = math.nan
        computed = CrossEntropies()
        if values and loss is not None and loss.numel() == 1:  # else no device has to be waited for
            number = loss.double().item()
            if forward is not None:
                multiple, items, auxiliary = forward.multiple(loss), forward.items, forward.auxiliary
                own_loss = math.nan if math.isnan(multiple) else forward.loss.double().item() - auxiliary
            if forward is not None and labels is not None and math.isfinite(number):
                computed = _compared(forward, labels)
        together_number, first = self.counted_together(place), 1 + MOST_LOSSES
        return SeenLoss(
            position=float(((together_number[0] * 1_000_003 + together_number[1]) * first + order) % 2**48),
            looks=float(zlib.crc32(looks.encode())) if loss is not None else math.nan,
            asks=asks,
            known=number_of(known),
            loss=number,
            own=own_loss,
            multiple=multiple,
            factor=1.0 if loss is None or not values else factor_of(loss),
            items=items,
            kind_of_class=number_of(forward.kind if forward is not None else self._forwards.only_kind),
            has_auxiliary=math.isfinite(auxiliary) and auxiliary != 0,
            low_precision=loss is not None and loss.dtype in (torch.bfloat16, torch.float16),
            dimensions=0 if labels is None else labels.ndim,
            looked=forward is not None and (forward.logits is not None or forward.loss is not None),
            compiled=self._forwards.is_blind,
            counted=bool(together),
            even=len({_labels_a_sample(counts) for counts in together if counts.samples}) <= 1,
            samples=total.samples if together else place.samples,
            labels=total.labels,
            shifted=total.shifted,
            ignored=total.ignored,
            values=computed,
        )

    def try_to_see(
        self, place: MicroBatchPlace, order: int, forward: Forward | None, loss: torch.Tensor, looks: str
    ) -> SeenLoss:
        """What this rank sees of a loss of which it tells the others nothing."""
        given = self._given
        seen = self.see(place, order, forward, loss, looks, asks=True, values=True)
        self._given = given
        return seen

    def tell(self, seen: SeenLoss) -> PendingRows:
        """Begins to tell all ranks (collective); `hear` gives what they told."""
        return self._exchange.share_loss(*told(seen))

    def hear(self, telling: PendingRows) -> list[SeenLoss]:
        """What all ranks have told of a loss, after what they told before.

        Raises:
            RuntimeError: on all ranks, if one asks others that have another loss, or know something else.
        """
        self.require_same_looks()  # in the order in which others told
        rows = telling.wait()
        everyone = seen_losses(rows, telling.values_of(ranks_with_values(rows)))
        _require_same_looks(everyone)
        return everyone

    def hear_later(self, telling: PendingRows) -> None:
        """Keeps what others tell until the step ends; the oldest is heard now where no step ever does (no_sync)."""
        self._unheard.append(telling)
        if len(self._unheard) > _MOST_UNHEARD:
            _require_same_looks(seen_losses(self._unheard.pop(0).wait(), {}))

    def require_same_looks(self) -> None:
        """Waits until all ranks have said what they know of the losses of this step.

        Raises:
            RuntimeError: on all ranks, if one of them has a loss that others have not.
        """
        while self._unheard:
            _require_same_looks(seen_losses(self._unheard.pop(0).wait(), {}))


def _require_same_looks(everyone: list[SeenLoss]) -> None:
    """Raises RuntimeError, the same on all ranks, if one asks others that are elsewhere, or know something else."""
    if not any(seen.asks for seen in everyone):
        return
    if len({seen.position for seen in everyone}) > 1:
        refuse_unequal_looks(everyone)
    if len({seen.known for seen in everyone if seen.known >= 0}) > 1:
        refuse_different_kinds(everyone)


def _compared(forward: Forward, labels: torch.Tensor) -> CrossEntropies:
    """The cross entropies of a forward, or none where they cannot be computed: other ranks wait for what this sees."""
    try:
        if forward.logits is not None:
            return cross_entropies(forward.logits, labels)
        return cross_entropies_of_rows(forward.row_losses, labels)
    except Exception as error:
        logger.warning_once(f"a trial of the loss failed, so it tells nothing: {type(error).__name__}: {error}")
        return CrossEntropies()


def _labels_a_sample(counts: LabelCounts) -> float:
    return counts.labels / counts.samples
