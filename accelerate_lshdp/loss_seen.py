# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ranks see of a loss, and what it may be if all of them are right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from accelerate_lshdp.loss_parts import Composition
from accelerate_lshdp.loss_values import CrossEntropies


#: Relative difference of losses that are taken for equal: both are computed from the same logits, in fp32 or better.
_EQUAL, _EQUAL_IN_LOW_PRECISION = 1e-5, 1e-2
#: The compositions of `CrossEntropies`, in its order.
_KINDS = (
    Composition.LABELS,
    Composition.SHIFTED_LABELS,
    Composition.SAMPLES,
    Composition.SUM,
    Composition.SUM,
)


class SeenLoss(NamedTuple):
    """What one rank sees of a loss."""

    loss: float
    own: float
    """The model's own loss without its auxiliary part, if the loss was made of it; else NaN."""
    multiple: float
    """By which the model's own loss was multiplied."""
    items: float
    """By which the model was told to divide."""
    kind_of_class: float
    """What the model's class says: an index, -1 if it says nothing."""
    has_auxiliary: float
    low_precision: float
    dimensions: float
    """Of the labels."""
    looked: float
    """Whether it has looked at a forward."""
    given: float
    """Whether the model was given other labels than the batch has."""
    counted: float
    """Whether all micro-batches that count together have labels that can be counted."""
    even: float
    """Whether these have as many labels a sample, each."""
    samples: float
    labels: float
    shifted: float
    ignored: float
    values: CrossEntropies

    @classmethod
    def width(cls) -> int:
        return len(cls._fields) - 1 + len(CrossEntropies._fields)

    def as_row(self) -> list[float]:
        return [float(value) for value in (*self[:-1], *self.values)]

    @classmethod
    def from_row(cls, row: list[float]) -> SeenLoss:
        fields = len(cls._fields) - 1
        return cls(*row[:fields], CrossEntropies(*row[fields:]))

    @property
    def tells(self) -> bool:
        """Whether its loss is a number that can be compared; that of a batch without labels is none."""
        return math.isfinite(self.loss) and self.loss != 0


def fitting_kinds(everyone: list[SeenLoss], factors: Iterable[float]) -> set[Composition]:
    """What the loss may be by its values: the same mean or sum, or the same multiple of it, on all ranks.

    Args:
        everyone: what each rank sees.
        factors: what scripts multiply a mean with that stays one.
    """
    telling = [seen for seen in everyone if seen.tells]
    tolerance = _tolerance(telling)
    own = is_own(everyone)
    fitting: set[Composition] = set()
    for index, kind in enumerate(_KINDS):
        values = [seen.values[index] for seen in telling]
        if not values or not all(map(math.isfinite, values)) or 0.0 in values:
            continue
        losses = [seen.own if own else seen.loss for seen in telling]
        multiples = [loss / value for loss, value in zip(losses, values, strict=True)]
        if not _equal(multiples, multiples[0], tolerance):
            continue
        if any(_equal(multiples, factor, tolerance) for factor in (factors if not own else (1.0,))):
            fitting.add(kind)
        elif kind is Composition.SUM and _is_divided(telling, multiples, own, tolerance):
            fitting.add(Composition.GLOBAL)
        elif kind is not Composition.SUM and not own and len(telling) > 1:
            fitting.add(kind)
    return fitting


def _is_divided(telling: list[SeenLoss], multiples: list[float], own: bool, tolerance: float) -> bool:
    """Whether a sum is divided by a number that is the same on all ranks."""
    if own:
        return _equal([seen.items * multiple for seen, multiple in zip(telling, multiples, strict=True)], 1, tolerance)
    return len(telling) > 1  # one rank's loss is some multiple of anything


def is_own(everyone: list[SeenLoss]) -> bool:
    """Whether the loss is the model's own, or the same multiple of it on all ranks."""
    multiples = [seen.multiple for seen in everyone if seen.tells]
    return bool(multiples) and _equal(multiples, multiples[0], _tolerance(everyone))


def _tolerance(everyone: list[SeenLoss]) -> float:
    return _EQUAL_IN_LOW_PRECISION if any(seen.low_precision for seen in everyone) else _EQUAL


def _equal(values: list[float], expected: float, tolerance: float) -> bool:
    return all(abs(value - expected) <= tolerance * abs(expected) for value in values)  # NaN equals nothing
