# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ranks see of a loss, and what it may be if all of them are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.accelerator.losses.values import CrossEntropies


#: Relative difference of losses that are taken for equal: both are computed from the same logits, in fp32 or better.
_EQUAL, _EQUAL_IN_LOW_PRECISION = 1e-5, 1e-2
#: The compositions of `CrossEntropies`, in its order.
_KINDS = (
    Composition.LABELS,
    Composition.SHIFTED_LABELS,
    *[Composition.SAMPLES] * 6,
    Composition.SUM,
    Composition.SUM,
)
_INDEX = {name: index for index, name in enumerate(CrossEntropies._fields)}
#: Sums divided by the number of samples, and for each the sum itself.
_SUMS_A_SAMPLE = {
    _INDEX["sums_a_sample"]: _INDEX["sum_of_labels"],
    _INDEX["shifted_sums_a_sample"]: _INDEX["sum_of_shifted"],
}
#: Means over all entries are means over samples if all rows are of one length: if those of their sums fit, too.
_POSITIONS = {
    _INDEX["positions"]: _INDEX["sums_a_sample"],
    _INDEX["shifted_positions"]: _INDEX["shifted_sums_a_sample"],
}


class SeenLoss(NamedTuple):
    """What one rank sees of a loss."""

    position: float
    """Of its batch and of the loss among those of the batch; ranks in step are at the same."""
    looks: float
    """A hash of what tells the loss from others; ranks have different ones where one has another loss in its batch."""
    asks: float
    """Whether it cannot go on without what the others see."""
    known: float
    """What it knows the loss to be, as a number of `number_of`; -1: nothing."""
    loss: float
    own: float
    """The model's own loss without its auxiliary part, if the loss was made of it; else NaN."""
    multiple: float
    """By which the model's own loss was multiplied."""
    factor: float
    """By which a loss was multiplied, as far as its graph shows it."""
    items: float
    """By which the model was told to divide."""
    kind_of_class: float
    """What the model's class says, as ``known``."""
    has_auxiliary: float
    low_precision: float
    dimensions: float
    """Of the labels."""
    looked: float
    """Whether it has looked at a forward."""
    compiled: float
    """Whether the forwards of a prepared model are in a compiled graph, so that they cannot be looked at."""
    counted: float
    """Whether all micro-batches that count together have labels that can be counted."""
    even: float
    """Whether these have as many labels a sample, each."""
    samples: float
    labels: float
    shifted: float
    ignored: float
    values: CrossEntropies

    @property
    def tells(self) -> bool:
        """Whether its loss is a number that can be compared; that of a batch without labels is none."""
        return math.isfinite(self.loss) and self.loss != 0

    @property
    def compared(self) -> bool:
        """Whether there are logits that its loss was compared with."""
        return self.tells and any(map(math.isfinite, self.values))


def number_of(kind: Composition | None) -> float:
    return -1.0 if kind is None else float(list(Composition).index(kind))


def kind_of(number: float) -> Composition | None:
    return None if number < 0 else list(Composition)[int(number)]


def fitting_kinds(everyone: Sequence[SeenLoss], factors: set[float]) -> set[Composition]:
    """What the loss may be by its values: the same mean or sum, or the same multiple of it, on all ranks.

    While all ranks have as many samples, a mean over samples is a sum divided by the number of all samples, too; so
    both fit, until their batches differ in size.

    Args:
        everyone: what each rank sees.
        factors: what scripts multiply a mean with that stays one.
    """
    telling = [seen for seen in everyone if seen.tells]
    tolerance = _tolerance(telling)
    own = is_own(everyone)
    several = len(telling) > 1  # one rank's loss is some multiple of anything
    multiples = [_multiple(telling, index, own, tolerance) for index in range(len(_KINDS))]
    for index, a_sample in _POSITIONS.items():
        multiples[index] = math.nan if math.isnan(multiples[a_sample]) else multiples[index]
    of_sums = {1.0} if own else factors
    # What the script has multiplied a mean with can be seen; a sum that was divided by something is a mean.
    of_means = of_sums if own or several else of_sums | {seen.factor for seen in telling if seen.factor}
    exact = {
        index
        for index, kind in enumerate(_KINDS)
        for factor in (of_sums if kind is Composition.SUM else of_means)
        if _equal([multiples[index]], factor, tolerance)
    }
    fitting = {_KINDS[index] for index in exact}
    for index, kind in enumerate(_KINDS):
        if index in exact or math.isnan(multiples[index]):
            continue
        if kind is Composition.SUM:
            if _is_divided(telling, multiples[index], tolerance) if own else several:
                fitting.add(Composition.GLOBAL)
        elif several and not own and _SUMS_A_SAMPLE.get(index) not in exact:
            fitting.add(kind)
    return fitting


def _multiple(telling: list[SeenLoss], index: int, own: bool, tolerance: float) -> float:
    """By what the loss is more than this mean or sum; NaN if not by the same on all ranks."""
    values = [seen.values[index] for seen in telling]
    if not values or not all(map(math.isfinite, values)) or 0.0 in values:
        return math.nan
    losses = [seen.own if own else seen.loss for seen in telling]
    multiples = [loss / value for loss, value in zip(losses, values, strict=True)]
    return multiples[0] if _equal(multiples, multiples[0], tolerance) else math.nan


def _is_divided(telling: list[SeenLoss], multiple: float, tolerance: float) -> bool:
    """Whether the model's own loss is a sum divided by the number that all models were told."""
    items = [seen.items for seen in telling]
    return _equal(items, items[0], tolerance) and _equal([items[0] * multiple], 1.0, tolerance)


def is_own(everyone: Sequence[SeenLoss]) -> bool:
    """Whether the loss is the model's own, or the same multiple of it on all ranks."""
    multiples = [seen.multiple for seen in everyone if seen.tells]
    return bool(multiples) and _equal(multiples, multiples[0], _tolerance(everyone))


def shares_differ(kinds: set[Composition], everyone: Sequence[SeenLoss]) -> bool:
    """Whether losses of these kinds count differently in the batches that are seen."""
    counts = []
    for kind in kinds:
        if kind is Composition.SHIFTED_LABELS:
            counts.append([seen.shifted for seen in everyone])
        elif kind is Composition.LABELS:
            counts.append([seen.labels for seen in everyone])
        else:
            counts.append([seen.samples if kind is Composition.SAMPLES else 1.0 for seen in everyone])
    shares = [[count / (sum(one) or 1.0) for count in one] for one in counts]
    uneven = any(kind.by_labels for kind in kinds) and not all(seen.even for seen in everyone)
    equal = all(_equal([a - b + 1.0], 1.0, _EQUAL) for one in shares for a, b in zip(one, shares[0], strict=True))
    return len(kinds) > 1 and (uneven or not equal)


def _tolerance(everyone: Sequence[SeenLoss]) -> float:
    return _EQUAL_IN_LOW_PRECISION if any(seen.low_precision for seen in everyone) else _EQUAL


def _equal(values: list[float], expected: float, tolerance: float) -> bool:
    return all(abs(value - expected) <= tolerance * abs(expected) for value in values)  # NaN equals nothing
