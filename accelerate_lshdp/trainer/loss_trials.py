# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a Trainer's loss is, found by trying it on the first batch, without dropout and gradients.

transformers takes every model whose forward has ``**kwargs`` for one that divides its loss by ``num_items_in_batch``.
Heads that ignore the number then get their loss multiplied by the number of ranks, and it is not divided by the
micro-batches: so the loss for twice the number must be half as large, or the number is not given any more.

A loss that is a mean is taken of a batch and of its two halves, to see what it is a mean over: once for all batches
that look alike, so that several tasks in turn are tried each for itself. Where another operation makes the loss of a
batch that looks like earlier ones, those are tried in every step from then on. A trial that fails tells nothing, and
the training goes on. What was found is in checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.losses.forwards import operations_of
from accelerate_lshdp.accelerator.losses.parts import Composition, halvings
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.runtime.object_exchange import all_objects
from accelerate_lshdp.trainer.trial_losses import TrialLosses


if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

#: A first batch may fit several answers, as one whose rows all have as many labels; later ones will not.
_MOST_TRIALS = 10
#: Tasks that texts of batches may name.
_MOST_LOOKS = 32
#: Relative difference of losses that are taken for equal; in bf16 and fp16 a product is off by up to 1/256 and 1/2048.
_EQUAL, _EQUAL_IN_LOW_PRECISION = 1e-4, 1e-2


class LossTrials:
    """The trials of one Trainer's loss. All methods are collective until they have found what they look for.

    Args:
        trainer: whose loss it is.
        findings: what was found, for JSON: filled here, and by a checkpoint that the training goes on from.
    """

    def __init__(self, trainer: Trainer, findings: dict[str, Any]) -> None:
        self._trainer = trainer
        self._findings = findings
        self._trials: dict[str, int] = {}
        self._looks: deque[str] = deque()  # of the micro-batches of the step whose losses are still to come
        self._current: str | None = None
        self._has_news = False  # whether any rank had a loss to try in this step
        self._operations: dict[str, str] = {}
        self._changed: set[str] = set()
        self._taken_for_mean = False
        self._losses = TrialLosses(trainer)

    def uses_count(self, batch: Mapping[str, Any], items: Any) -> bool:
        """Whether the loss is divided by the number of items that it is given; else it is not given it any more."""
        several = self._trainer.accelerator.num_processes > 1 or self._trainer.args.gradient_accumulation_steps > 1
        if self._findings.get("uses_count") is None and several:
            once, twice = self._losses.of((batch, items), (batch, 2 * items))
            divided = _is_divided(once, twice, self._tolerance)
            if divided and not self._losses.have_auxiliary:
                _warn_of_a_part(once, twice, self._tolerance)
            answers = {answer for answer in all_objects(divided) if answer is not None}
            if answers:
                self._findings["uses_count"] = True in answers
        uses_count = self._findings.get("uses_count") is not False
        if not uses_count and not self._taken_for_mean:
            self._take_for_mean()
        return uses_count

    def _take_for_mean(self) -> None:
        trainer, self._taken_for_mean = self._trainer, True
        trainer.model_accepts_loss_kwargs = False
        # For a Trainer that has no such attribute `TrainerLosses` divides.
        if trainer.compute_loss_func is not None and hasattr(trainer, "loss_is_scaled_for_ga"):
            trainer.loss_is_scaled_for_ga = False
        logger.warning(
            f"the loss of {type(trainer.accelerator.unwrap_model(trainer.model)).__name__} does not depend on "
            "num_items_in_batch, though the Trainer takes it for granted and would multiply it by the number of "
            "processes: it is taken for a mean over its batch, and weighted by the size of that"
        )

    def compositions(
        self, batches: Sequence[Any], samples: Sequence[int | None], numbers: Sequence[int]
    ) -> list[Composition]:
        """What losses that are not divided by a number of items are made of (collective).

        Args:
            batches: this rank's micro-batches of a step.
            samples: of each; None: as many as rows.
            numbers: of the global batch that each is a part of, from the first of the step.
        """
        if self._counts_in_one_way:
            return [Composition.SAMPLES] * len(batches)
        looks = [self._look(batch) for batch in batches]
        in_step: dict[str, Composition] = {}
        news = len(self._unknown(looks, numbers)) + len(self._changed)
        session = self._trainer.accelerator.session
        session.engine.collective_begins()
        self._has_news = session.exchange.sum(torch.tensor([news], dtype=torch.float64)).item() > 0
        if self._has_news:
            self._agree_on_changes()
            tried = self._tried(looks, numbers)
            for look in sorted(set().union(*all_objects(self._unknown(looks, numbers)))):
                index = tried.index(look) if look in tried else None
                batch, size = (batches[0], None) if index is None else (batches[index], samples[index])
                is_varying = any(look.startswith(f"{each} [") for each in self._varying)
                in_step[look] = self._try(look, batch, size, is_own=index is not None, is_varying=is_varying)
        self._looks = deque(looks)
        return [in_step.get(look) or Composition[self._known[look]] for look in self._tried(looks, numbers)]

    def micro_batch_begins(self) -> None:
        """Takes note that the losses that follow are of the next micro-batch of the step."""
        self._current = self._looks.popleft() if self._looks else None

    def see(self, loss: torch.Tensor) -> None:
        """Takes note of the operation that made the first loss of the micro-batch that has begun."""
        (look, self._current), operation = (self._current, None), operations_of(loss)
        if look is not None and operation and self._operations.setdefault(look, operation) != operation:
            self._changed.add(look)

    def _agree_on_changes(self) -> None:
        """Lets losses of batches that look alike be tried in every step, if any rank has seen that they differ."""
        for look in sorted(set().union(*all_objects(self._changed)) - set(self._varying)):
            logger.warning(
                "found a loss that another operation made than that of earlier batches that look alike. What it is a "
                "mean over is tried in every step from now on, with forwards of the halves of each batch; the step "
                "before counted it like those. Batches that tell their task, by another column or by a text beside "
                "the tensors, are tried once"
            )
            self._varying.append(look)
            self._known.pop(look, None)
        self._changed.clear()

    def _tried(self, looks: Sequence[str], numbers: Sequence[int]) -> list[str]:
        """The names under which losses of a step are tried: those that vary by themselves in each global batch."""
        named = zip(looks, numbers, strict=True)
        return [f"{look} [{number}]" if look in self._varying else look for look, number in named]

    def _unknown(self, looks: Sequence[str], numbers: Sequence[int]) -> set[str]:
        return {look for look in self._tried(looks, numbers) if look not in self._known}

    @property
    def _known(self) -> dict[str, str]:
        """The names of what was found, by the looks of batches: the same on all ranks."""
        return self._findings.setdefault("compositions", {})

    @property
    def _varying(self) -> list[str]:
        """Looks of batches that do not tell what their loss is: the same on all ranks."""
        return self._findings.setdefault("varying", [])

    @property
    def may_count_labels(self) -> bool:
        """Whether any rank may have a loss that is a mean over labels: the same on all ranks."""
        by_labels = {kind.name for kind in Composition if kind.by_labels}
        return bool(self._varying or by_labels.intersection(self._known.values()) or self._has_news)

    @property
    def _counts_in_one_way(self) -> bool:
        accelerator = self._trainer.accelerator
        return accelerator.num_processes == 1 and not accelerator.plan.has_accumulation

    def _look(self, batch: Any) -> str:
        """What tells batches of one task from those of another: the names, kinds and dimensions of what they hold."""
        if not isinstance(batch, Mapping):
            return type(batch).__name__
        parts = [f"{name}: {_kind_of(value)}" for name, value in batch.items()]
        texts = [f"{name} = {value}" for name, value in batch.items() if isinstance(value, str)]  # as of its data set
        named = ", ".join(sorted(parts + texts))
        # A text that is another one in every batch names no task.
        seen = self._known.keys() | self._trials.keys()
        return named if named in seen or len(seen) < _MOST_LOOKS else ", ".join(sorted(parts))

    def _try(self, look: str, batch: Any, samples: int | None, *, is_own: bool, is_varying: bool) -> Composition:
        """Tries the loss of a batch; again in later steps while several answers fit (collective).

        Args:
            look: of the batch.
            batch: of this rank.
            samples: of it; None: as many as rows.
            is_own: whether this rank has such a batch. Else it only takes part in the forwards.
            is_varying: whether the next batch that looks like it may have another loss.
        """
        # Ranks that have such a batch find the same plausible: by how it looks, and by the model.
        plausible = next(each for each in all_objects(self._plausible(batch) if is_own else None) if each)
        found = self._fitting(batch, samples, plausible, look, is_own)
        fitting = set.intersection(*(each for each in all_objects(found if is_own else None) if each is not None))
        likeliest = next((kind for kind in plausible if kind in fitting), Composition.UNKNOWN)
        if not is_varying:
            self._trials[look] = self._trials.get(look, 0) + 1
            if len(fitting) < 2 or self._trials[look] == _MOST_TRIALS:
                self._known[look] = likeliest.name
        if likeliest is Composition.UNKNOWN:
            logger.warning_once(
                "the loss of a batch is neither the mean over its samples or labels nor the sum over samples. It "
                "is weighted by samples, so unequal batches do not give exactly the gradient of the global batch"
            )
        return likeliest

    def _plausible(self, batch: Any) -> list[Composition]:
        """What the loss may be, the likeliest first."""
        accelerator = self._trainer.accelerator
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not torch.is_tensor(labels) or labels.ndim < 2 or labels.is_floating_point():
            return [Composition.SAMPLES, Composition.SUM]
        by_labels = [Composition.LABELS, Composition.SHIFTED_LABELS]
        # Trainers of transformers 5.5 do not say it.
        loss_type = getattr(accelerator.unwrap_model(self._trainer.model), "loss_type", None)
        if getattr(self._trainer, "_loss_shifts_labels", loss_type == "ForCausalLM"):
            by_labels.reverse()
        return [*by_labels, Composition.SAMPLES, Composition.SUM]

    def _fitting(
        self, batch: Any, samples: int | None, plausible: list[Composition], look: str, is_own: bool
    ) -> set[Composition]:
        """What the losses of the halves allow; all that is plausible if they tell nothing (collective)."""
        if len(plausible) == 1:
            return set(plausible)
        ways = halvings(batch, samples) if is_own else []
        most = max(all_objects(len(ways)))
        if most == 0:
            if look not in self._trials:
                logger.warning_once(
                    "no rank can try the loss with halves of its batch (micro-batches of one sample, or batches that "
                    f"are no dicts), so it is taken for {plausible[0].value}. A loss that is something else is not "
                    "exactly that of one process"
                )
            return set(plausible)
        halves = [half for way in ways for half in way]
        # Also where there are no halves: other ranks of a sharded model wait for this one's forward.
        parts = [part for part, _ in halves] + [batch] * (2 * most - len(halves))
        whole, *losses = self._losses.of(*((part, None) for part in (batch, *parts)))
        fitting = [
            self._fitting_way(whole, losses[2 * number : 2 * number + 2], way, plausible)
            for number, way in enumerate(ways)
        ]
        return set.union(*fitting) if fitting else set(plausible)

    def _fitting_way(
        self, whole: float, losses: list[float], halves: tuple[tuple[Any, int], ...], plausible: list[Composition]
    ) -> set[Composition]:
        if not all(map(math.isfinite, (whole, *losses))):
            return set(plausible)
        fitting = set()
        for kind in plausible:
            counts = [kind.count(part, samples) for part, samples in halves]
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
            parameter.dtype in low for parameter in parameters_of(self._trainer.model)
        )
        return _EQUAL_IN_LOW_PRECISION if is_low else _EQUAL


def _kind_of(value: Any) -> str:
    if not torch.is_tensor(value):
        return type(value).__name__
    return f"{'real' if value.is_floating_point() else 'integer'} {value.ndim}"


def _is_divided(once: float, twice: float, tolerance: float) -> bool | None:
    """Whether the second loss is half of the first; None if they tell nothing, as losses of 0 and NaN."""
    if once == 0 or not math.isfinite(once) or not math.isfinite(twice):
        return None
    if abs(once - twice) <= tolerance * abs(once):
        return False
    return True


def _warn_of_a_part(once: float, twice: float, tolerance: float) -> None:
    if abs(once - 2 * twice) > tolerance * abs(once):
        logger.warning(
            f"the loss is {once:.6g}, and {twice:.6g} for twice the number of items: only a part of it is divided by "
            "num_items_in_batch. The rest (an auxiliary loss?) counts the same on every rank, whatever its batch "
            "size, and is not exactly that of one process"
        )
