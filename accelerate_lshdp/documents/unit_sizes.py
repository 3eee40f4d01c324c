# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ModelUnits`: the measured sizes of a model's units, as profiles carry them. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement
from accelerate_lshdp.documents.records import (
    LARGEST_COUNT,
    STRING,
    Record,
    choice,
    entry,
    integer,
    number,
    optional,
    record,
    several,
)
from accelerate_lshdp.documents.value_checks import PlanError


#: What accelerate's `mixed_precision` may be.
PRECISIONS = ("no", "bf16", "fp16")

#: Rows of the weights that can be gathered in slices, at least: each slice has a row of every rank.
LEAST_SLICEABLE_ROWS = 256


@dataclass(frozen=True, slots=True)
class SliceableWeights(Record):
    """The weights of a unit that can be gathered in slices, and what that takes.

    Args:
        parameters: number of parameters in them.
        forward: parameters that one forward gathers: those of each weight as often as it is used.
        backward: parameters that one backward gathers; of an embedding it needs none.
        uses: how often a forward uses one of them.
        logits_bytes: bytes of one sample's logits, of which a loss keeps as many, if one of the weights is that of an
            output head and the model computes the loss as a head in slices can. None: there is no such head.
        loss_bytes: bytes of one sample that a forward or a backward has at a time for no other reason than these
            logits: what the loss keeps, and by how much their gradients are more than the working bytes of others.
    """

    parameters: int = entry(integer(least=1, most=LARGEST_COUNT))
    forward: int = entry(integer(most=LARGEST_COUNT))
    backward: int = entry(integer(most=LARGEST_COUNT))
    uses: int = entry(integer(most=LARGEST_COUNT))
    logits_bytes: float | None = entry(optional(number()), default=None, omit=True)
    loss_bytes: float | None = entry(optional(number()), default=None, omit=True)

    def _check_together(self) -> None:
        if (self.logits_bytes is None) != (self.loss_bytes is None):
            raise PlanError(
                f"found {self.logits_bytes} and {self.loss_bytes}, expected both or none.",
                path="logits_bytes, loss_bytes",
            )


@dataclass(frozen=True, slots=True)
class MeasuredUnit(Record):
    """The measured sizes of one unit, or of the root: what is in no unit.

    Args:
        modules: full names of its modules: several if they share a parameter; the empty string for the root.
        parameters: number of its parameters, each once.
        trainable: number of those that have gradients.
        activation_bytes: bytes of one sample that it keeps for the backward. What several units keep counts for the
            first of them, so that the sum over the units and the root is what the model keeps.
        input_bytes: bytes of one sample that are kept instead if it recomputes its activations: those of its input.
        flops: operations of one sample's forward; a multiplication and an addition are two.
        largest_parameter: numbers in the largest parameter that has gradients; an optimizer steps it in one go.
        sliceable: its weights with at least `LEAST_SLICEABLE_ROWS` rows that operators can take in slices. None: it
            has none, or a weight that would be in slices is used by other operators, too.
    """

    modules: tuple[str, ...] = entry(several(STRING))
    parameters: int = entry(integer(most=LARGEST_COUNT))
    trainable: int = entry(integer(most=LARGEST_COUNT))
    activation_bytes: float = entry(number())
    input_bytes: float = entry(number())
    flops: float = entry(number())
    largest_parameter: int = entry(integer(most=LARGEST_COUNT))
    sliceable: SliceableWeights | None = entry(optional(record(SliceableWeights)), default=None, omit=True)

    def _check_together(self) -> None:
        if not self.modules:
            raise PlanError('found no module, expected the names of the unit\'s, or "" of the root.', path="modules")
        if self.trainable > self.parameters:
            raise PlanError(
                f"found {self.trainable} trainable parameters, expected at most all {self.parameters}.",
                path="trainable",
            )
        if self.largest_parameter > self.trainable:
            raise PlanError(
                f"found {self.largest_parameter} numbers in the largest one, expected at most all {self.trainable}.",
                path="largest_parameter",
            )
        if self.sliceable is not None and self.sliceable.parameters > self.parameters:
            raise PlanError(
                f"found {self.sliceable.parameters} sliceable parameters, expected at most all {self.parameters}.",
                path="sliceable.parameters",
            )

    @property
    def name(self) -> str:
        """The name by which planning knows the unit: that of its first module."""
        return self.modules[0]


@dataclass(frozen=True, slots=True)
class MeasuredHead(Record):
    """What a model needs for one sample where its forward ends and its backward begins, in bytes.

    Args:
        kept_bytes: of the root's activations, those that are kept after the last unit: free before its backward.
        working_bytes: of the largest of these, twice: see `ModelUnits.working_bytes`.
        units_working_bytes: of the largest other activation, twice.
        output_bytes: of what the forward returns, which a script holds until the next forward has returned.
        own_output_bytes: of that, what is not among the activations.
    """

    kept_bytes: float = entry(number())
    working_bytes: float = entry(number())
    units_working_bytes: float = entry(number())
    output_bytes: float = entry(number())
    own_output_bytes: float = entry(number())


@dataclass(frozen=True, slots=True)
class ModelUnits(Record):
    """The measured sizes of all units of a model.

    Args:
        units: in the order of registration; empty: everything is in the root.
        root: what is in no unit, such as embeddings and heads.
        working_bytes: bytes of one sample's largest activation, twice: its gradient, and the one that this is computed
            from, exist beside it for a moment.
        mixed_precision: of the forward that was measured: "no", "bf16" or "fp16".
        parameter_bytes: bytes of a parameter as the model keeps it, on average.
        head: what the end of the forward needs. None: it is not known, there are no units, or one has several
            forwards.
    """

    units: tuple[MeasuredUnit, ...] = entry(several(record(MeasuredUnit)))
    root: MeasuredUnit = entry(record(MeasuredUnit))
    working_bytes: float = entry(number())
    mixed_precision: str = entry(choice(PRECISIONS), default="no")
    parameter_bytes: float = entry(number(positive=True), default=4.0)
    head: MeasuredHead | None = entry(optional(record(MeasuredHead)), default=None, omit=True)

    def _check_together(self) -> None:
        if self.root.modules != ("",):
            raise PlanError(f'found {list(self.root.modules)}, expected [""].', path="root.modules")
        names = [name for unit in self.units for name in unit.modules]
        twice = next((name for name in names if not name or names.count(name) > 1), None)
        if twice is not None:
            raise PlanError(f'found "{twice}" as the module of a unit, expected each once, and the root apart.')

    @property
    def activation_bytes(self) -> float:
        """Bytes of one sample that the model keeps for the backward."""
        return sum(unit.activation_bytes for unit in (*self.units, self.root))

    @property
    def flops(self) -> float:
        """Operations of one sample's forward."""
        return sum(unit.flops for unit in (*self.units, self.root))

    def with_all_modules(self, placement: ModelPlacement) -> ModelPlacement:
        """A placement of units by their names, with one entry for each of their modules.

        What it does not name has the placement that most of its units have without recomputing.
        """
        given = dict(placement.units)
        named = [
            (module, given[unit.name])
            for unit in (*self.units, self.root)
            if unit.name in given
            for module in unit.modules
        ]
        return replace(placement, units=tuple(named), default=_most_frequent(p for _, p in named))


def _most_frequent(placements: Iterable[UnitPlacement]) -> UnitPlacement:
    stores = [placement.store for placement in placements]
    return UnitPlacement(store=max(dict.fromkeys(stores), key=stores.count)) if stores else UnitPlacement()
