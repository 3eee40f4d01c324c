# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the losses of a script are means over, found out in the first backwards of its loop.

A loss is given to ``backward`` as a number. Its rank compares it with what it would be as the mean over labels, over
samples, ... of the logits of the last forward (`loss_values`); the answer is the one that holds on all ranks. Where
there are no such logits, but the loss is the model's own, the model's class says it.

The shares are those of one process: a mean over labels is one over the labels of the *global batch*, and the global
batches of a script's own accumulation count the same.
"""

from __future__ import annotations

import inspect
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import nn

from accelerate_lshdp.data_tokens import LabelCounter, LabelCounts, integer_labels
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.loss_parts import Composition
from accelerate_lshdp.loss_seen import SeenLoss, fitting_kinds, is_own
from accelerate_lshdp.loss_values import CrossEntropies, Forward, cross_entropies
from accelerate_lshdp.weighting import LossWeighting, loss_share


if TYPE_CHECKING:
    from accelerate_lshdp.data_places import MicroBatchPlace
    from accelerate_lshdp.step_exchange import StepExchange

logger = get_logger(__name__)

#: A first batch may fit several answers, as one whose rows all have as many labels; later ones will not.
_MOST_TRIALS = 10
#: Losses of one batch that are told apart. More are of a script that trains on one batch again and again.
_MOST_LOSSES = 3
_KINDS_OF_CLASSES = (Composition.SAMPLES, Composition.LABELS, Composition.SHIFTED_LABELS)
_MEAN_OVER_SAMPLES = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForQuestionAnswering",
)


class LossFinder:
    """Says by how much each loss counts in its step, as it was found to be.

    Losses are told apart by their order among those of one batch.

    Args:
        exchange: what ranks tell each other.
        counter: counts labels in the prepared loaders.
        findings: names of compositions, for JSON: filled here, and by a checkpoint that the run goes on from.
        sizes_change: whether ranks may get other batch sizes while the run goes on.
    """

    def __init__(
        self, exchange: StepExchange, counter: LabelCounter, findings: dict[str, Any], *, sizes_change: bool
    ) -> None:
        self._exchange = exchange
        self._sizes_change = sizes_change
        self._counter = counter
        self._findings = findings
        self.idle = False
        """Whether somebody else says by how much losses count, or they can count in one way only."""
        self._forward: Forward | None = None
        self._class = -1
        self._place: MicroBatchPlace | None = None
        self._order = 0  # of the loss among those of its batch
        self._trials: dict[str, int] = {}
        self._likeliest: dict[str, Composition] = {}  # for the micro-batches that follow the first of their group
        self._totals: dict[str, LabelCounts | None] = {}
        self._looked_at: dict[
            str, tuple[MicroBatchPlace, tuple[int, int]]
        ] = {}  # by loss: where, and for which batches
        self.by_labels = False
        """Whether the last loss counted by its labels."""
        self._given: tuple[MicroBatchPlace, LabelCounts] | None = None  # labels that are not those of the batch

    # Forwards

    def watch(self, model: nn.Module) -> None:
        """Looks at the forwards of a prepared model."""
        finder = self

        # Functions, not methods: see PreparedModel.
        def watched(called: nn.Module) -> bool:
            compiles = torch.compiler.is_compiling()
            return torch.is_grad_enabled() and not (finder.idle or compiles) and PreparedModel.of(called) is not None

        def before_forward(called: nn.Module, args: tuple) -> None:
            if watched(called):
                finder._forward = None  # not beside the activations of the next one

        def after_forward(called: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if watched(called):
                finder._forward_ended(called, args, kwargs, output)

        model.register_forward_pre_hook(before_forward)
        model.register_forward_hook(after_forward, with_kwargs=True)

    def _forward_ended(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not self._is_settled:
            named = _named(model, args, kwargs)
            labels = integer_labels(named)
            self._forward = Forward.of(model, labels, named.get("num_items_in_batch"), output)
            self._class = _kind_of_class(model, labels)
        elif any(found["given"] for found in self._findings.values()):
            # Else the labels are those of the batch, which its loader has counted: no device is waited for.
            self._forward = Forward(integer_labels(_named(model, args, kwargs)))

    @property
    def _is_settled(self) -> bool:
        return bool(self._findings) and self._trials.keys() <= self._findings.keys()

    # Shares

    def look_before_meeting(self, place: MicroBatchPlace) -> None:
        """Does this rank's part of looking at the first loss of a micro-batch, of which there is no loss yet.

        Where ranks have different numbers of micro-batches, one calls a collective before its only backward that
        others reach in their last micro-batch. They have to get past their first one before.
        """
        if not self.idle and place is not self._place and self._starts(place):
            self._look_once("loss 0", place, None)

    def _starts(self, place: MicroBatchPlace) -> bool:
        return place.window_start if self._counter.of_steps else place.micro_batch == 0

    def _look_once(self, name: str, place: MicroBatchPlace, loss: torch.Tensor | None) -> None:
        """Looks at the first loss of those micro-batches that are counted together, whichever that is.

        The script may have left out the loss of the first one, on all ranks (a loss that is NaN).
        """
        together = (place.epoch, place.window if self._counter.of_steps else place.global_batch)
        before, looked = self._looked_at.get(name, (None, None))
        if looked != together or (self._starts(place) and before is not place):
            self._looked_at[name] = place, together
            self._look(name, place, loss)

    def share(self, place: MicroBatchPlace, loss: torch.Tensor) -> float:
        """The share of a loss in its step (collective in the first micro-batch of those that are counted together).

        Raises:
            RuntimeError: on all ranks, if it depends on what the loss is a mean over and nobody can tell.
        """
        if self.idle:
            return _share_of_samples(place)
        self._order = min(self._order + 1, _MOST_LOSSES) if place is self._place else 0
        self._place = place
        name = f"loss {self._order}"
        self._look_once(name, place, loss)
        kind, together = self._likeliest.get(name, Composition.SAMPLES), self._totals.get(name)
        self.by_labels = kind.by_labels and together is not None
        if self.by_labels:
            own, total = (_count(kind, counts) for counts in (self._own(place), together))
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

    def _look(self, name: str, place: MicroBatchPlace, loss: torch.Tensor | None) -> None:
        """Finds what the loss is and how many labels it is over, as far as these are not known (collective)."""
        known = self._findings.get(name)
        if known is not None and not known["counts"]:
            self._likeliest[name], self._totals[name] = Composition[known["composition"]], None
            return
        everyone = self._tell(self._see(place, loss, known is None))
        self._totals[name] = None
        if all(seen.counted for seen in everyone):
            columns = zip(*((s.samples, s.labels, s.shifted, s.ignored) for s in everyone), strict=True)
            self._totals[name] = LabelCounts(*(int(sum(column)) for column in columns))
        if known is None:
            self._likeliest[name] = self._find(name, everyone, place)
        else:
            self._likeliest[name] = Composition[known["composition"]]
        kind = self._likeliest[name]
        if kind.by_labels and self._totals[name] is None and any(seen.dimensions for seen in everyone):
            raise RuntimeError(
                f"found a loss that is {kind.value}, but not all of these are in batch['labels'] of the prepared "
                "loader: those of the micro-batches that follow are not known yet, so nobody can tell by how much "
                "this one counts. Put the labels that the model is given into the batches (in the collator), or use "
                "a plan without accumulation"
            )
        if kind is Composition.UNKNOWN and not is_own(everyone):
            self._refuse_uneven_labels(everyone)

    def _own(self, place: MicroBatchPlace) -> LabelCounts:
        """This micro-batch's labels: of the batch, or what the model was given in their place."""
        if self._given is not None and self._given[0] is place:
            return self._given[1]
        return place.labels.own

    def _see(self, place: MicroBatchPlace, loss: torch.Tensor | None, values: bool) -> SeenLoss:
        forward, of_batch = self._forward or Forward(None), place.labels
        labels = of_batch.values if of_batch is not None else None
        together = of_batch.together if of_batch is not None else ()
        self._given = None
        if forward.labels is not None:
            labels = forward.labels
            own = LabelCounts.of(labels, place.samples)
            alone = place.window_start and place.window_end if self._counter.of_steps else place.micro_batches == 1
            if (of_batch is None or own != of_batch.own) and (alone or not self._counter.of_steps):
                # Those of the micro-batches that follow are not known yet.
                together = (own,) if alone else ()
                self._given = place, own
        total = sum(together, LabelCounts())
        number = multiple = math.nan
        computed = CrossEntropies()
        if (
            values and loss is not None and loss.numel() == 1
        ):  # else nothing is compared, and no device has to be waited for
            number, multiple = loss.double().item(), forward.multiple(loss)
            if forward.logits is not None and labels is not None and math.isfinite(number):
                computed = _compared(forward.logits, labels)
        return SeenLoss(
            loss=number,
            own=math.nan if math.isnan(multiple) else forward.loss.double().item() - forward.auxiliary,
            multiple=multiple,
            items=forward.items,
            kind_of_class=self._class,
            has_auxiliary=forward.auxiliary != 0,
            low_precision=loss is not None and loss.dtype in (torch.bfloat16, torch.float16),
            dimensions=0 if labels is None else labels.ndim,
            looked=loss is not None and (forward.logits is not None or forward.loss is not None),
            given=self._given is not None,
            counted=bool(together),
            even=len({_labels_a_sample(counts) for counts in together if counts.samples}) <= 1,
            samples=total.samples,
            labels=total.labels,
            shifted=total.shifted,
            ignored=total.ignored,
            values=computed,
        )

    def _tell(self, seen: SeenLoss) -> list[SeenLoss]:
        rows = torch.zeros(self._exchange.world_size, SeenLoss.width(), dtype=torch.float64)
        rows[self._exchange.rank] = torch.tensor(seen.as_row(), dtype=torch.float64)
        return [SeenLoss.from_row(row) for row in self._exchange.sum(rows).tolist()]

    # What it is

    def _find(self, name: str, everyone: list[SeenLoss], place: MicroBatchPlace) -> Composition:
        """What the loss is, the same on all ranks; settled once it is clear."""
        fitting = fitting_kinds(everyone, {1.0, 1.0 / place.accumulation_steps})
        of_class = _KINDS_OF_CLASSES[int(everyone[0].kind_of_class)] if everyone[0].kind_of_class >= 0 else None
        telling = [seen for seen in everyone if seen.tells]
        order = [Composition.LABELS, Composition.SHIFTED_LABELS, Composition.SAMPLES, Composition.SUM]
        order.append(Composition.GLOBAL)
        dimensions = max(seen.dimensions for seen in everyone)
        preferred = Composition.SAMPLES if dimensions == 1 or of_class is Composition.SAMPLES else None
        if dimensions > 1:
            preferred = of_class
        if self._counter.of_steps:  # the script says that it is one of these two
            order = [kind for kind in order if kind.by_labels]
            fitting &= set(order)
            preferred = of_class if of_class in order else Composition.LABELS
        order.sort(key=lambda kind: kind is not preferred)
        kind = next((kind for kind in order if kind in fitting), Composition.UNKNOWN)
        by_class = kind is Composition.UNKNOWN and (self._counter.of_steps or is_own(everyone))
        if by_class or not telling:
            kind = preferred or Composition.UNKNOWN
        if not telling and name in self._likeliest:
            kind = self._likeliest[name]
        trials = self._trials[name] = self._trials.get(name, 0) + bool(telling)
        not_seen = trials < 2 and not any(seen.looked for seen in everyone)  # others were settled before it came
        if not telling or not_seen or (len(fitting) > 1 and trials < _MOST_TRIALS):
            return kind
        self._settle(name, kind, everyone, by_class, self._sizes_change or _has_unequal_sizes(place))
        return kind

    def _settle(self, name: str, kind: Composition, everyone: list[SeenLoss], by_class: bool, unequal: bool) -> None:
        counted = all(seen.counted for seen in everyone)
        # An unknown loss is watched: labels of which ranks have different shares show only later.
        watched = kind is Composition.UNKNOWN and everyone[0].dimensions > 1 and not is_own(everyone)
        counts = counted and (kind.by_labels or watched)
        given = any(seen.given for seen in everyone)
        self._findings[name] = {"composition": kind.name, "counts": counts, "given": given}
        if not any(found["counts"] for found in self._findings.values()):
            self._counter.wanted = False
        which = "the loss" if name == "loss 0" else f"{name} of each batch (counted from 0)"
        if kind is Composition.UNKNOWN and unequal:
            logger.warning(
                f"{which} is none that can be recognised, so it is taken for a mean over samples. If it is one, say "
                "so with loss_weighting='sample' (LSDPPlugin, or LSDP_LOSS_WEIGHTING=sample in the environment); a "
                "loss that is no mean over samples, as one that compares them with each other, is not exactly that "
                "of one process"
            )
        elif kind not in (Composition.SAMPLES, Composition.UNKNOWN):
            by = ", as of other models of its class" if by_class else ""
            logger.warning(f"{which} was found to be {kind.value}{by}: unequal batches count by that")
        if any(seen.has_auxiliary for seen in everyone):
            logger.warning(
                "the model adds an auxiliary loss (aux_loss) that is no mean over samples or labels; it counts like "
                "the rest, so it is not exactly that of one process"
            )

    def _refuse_uneven_labels(self, everyone: list[SeenLoss]) -> None:
        if not all(seen.counted for seen in everyone) or not any(seen.ignored for seen in everyone):
            return
        shares = {seen.labels / seen.samples for seen in everyone if seen.samples}
        if len(shares) > 1 or not all(seen.even for seen in everyone):
            found = ", ".join(f"{seen.labels:.0f} labels in {seen.samples:.0f} samples" for seen in everyone)
            raise RuntimeError(
                f"found batches with different numbers of labels other than -100 ({found}; one entry a rank), and a "
                "loss that is neither the model's own nor a mean that can be recognised: it counts by samples or by "
                "labels, and nobody can tell. Say it with LSDPPlugin(loss_weighting='sample'), 'tokens' (see "
                "token_counter) or 'none' (weight it yourself), or LSDP_LOSS_WEIGHTING in the environment"
            )


def _compared(logits: torch.Tensor, labels: torch.Tensor) -> CrossEntropies:
    """`cross_entropies`, or nothing where they cannot be computed: other ranks wait for what this one sees."""
    try:
        return cross_entropies(logits, labels)
    except Exception as error:
        logger.warning_once(f"a trial of the loss failed, so it tells nothing: {type(error).__name__}: {error}")
        return CrossEntropies()


def _named(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward by their names, as far as they have some."""
    names = list(inspect.signature(type(model).forward).parameters)[1:] if args else []
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _has_unequal_sizes(place: MicroBatchPlace) -> bool:
    return len(set(zip(place.cut.sizes, place.cut.steps, strict=True))) > 1


def _share_of_samples(place: MicroBatchPlace) -> float:
    return place.samples / (place.total_samples * place.accumulation_steps)


def _count(kind: Composition, counts: LabelCounts) -> int:
    return counts.shifted if kind is Composition.SHIFTED_LABELS else counts.labels


def _labels_a_sample(counts: LabelCounts) -> float:
    return counts.labels / counts.samples


def _kind_of_class(model: nn.Module, labels: torch.Tensor | None) -> int:
    """What the own loss of a model of transformers is, by its class: in ``_KINDS_OF_CLASSES``; -1: unknown."""
    if not hasattr(model, "loss_type"):
        return -1
    if model.loss_type in _MEAN_OVER_SAMPLES:
        return 0
    if model.loss_type in ("ForMaskedLM", "ForTokenClassification"):
        return 1
    shifts = loss_shifts_labels(model)
    if (labels is None or labels.ndim > 1) and (model.loss_type is None or shifts or _is_encoder_decoder(model)):
        return 2 if shifts else 1
    return -1


def loss_shifts_labels(model: nn.Module) -> bool:
    """Whether a model of transformers predicts each label from the entry before it, as far as its class says.

    Decoders of encoder-decoders get shifted inputs instead. Classes that name no loss have that of causal models.
    """
    if _is_encoder_decoder(model):
        return False
    losses = sys.modules.get("transformers.loss.loss_utils")
    causal = getattr(losses, "ForCausalLMLoss", None)
    kind = getattr(model, "loss_type", None)
    return kind in (None, "ForCausalLM") or (causal is not None and losses.LOSS_MAPPING.get(kind) is causal)


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
