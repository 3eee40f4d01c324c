# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The `placement` section of a plan: where each unit of a model keeps its parameters (OSDP). Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from accelerate_lshdp.documents.records import (
    BOOLEAN,
    LARGEST_COUNT,
    Record,
    Value,
    entry,
    integer,
    member,
    optional,
    record,
    several,
)
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.documents.value_checks import PlanError, at_key, describe, located, nearest


class UnitStore(str, Enum):
    """Where one unit keeps its parameters, gradients and optimizer states.

    Attributes:
        strategy: the strategy that keeps all units this way: bytes, groups and overlap of the unit are the strategy's.
        reshards_to_node: after the forward a unit keeps the shards of the node's copy (hpZ of ZeRO++, Wang et al.,
            2023), so that the backward gathers inside the node.
    """

    strategy: Strategy
    reshards_to_node: bool

    REPLICATE = "replicate", Strategy.DDP
    NODE = "node", Strategy.GROUP_SHARDING
    WORLD = "world", Strategy.FSDP
    WORLD_KEPT = "world_kept", Strategy.ZERO2
    WORLD_TO_NODE = "world_to_node", Strategy.FSDP, True
    HOST = "host", Strategy.LSDP

    def __new__(cls, name: str, strategy: Strategy, reshards_to_node: bool = False) -> UnitStore:
        store = str.__new__(cls, name)
        store._value_ = name
        store.strategy = strategy
        store.reshards_to_node = reshards_to_node
        return store

    def __str__(self) -> str:
        return self.value

    def takes_slices(self, name: str) -> bool:
        """Whether the unit of a name may have its large weights in slices.

        Stores other than `WORLD` and `HOST` keep what they have gathered, or a part of it. Units are streamed from the
        host one at a time, but what is in none of them (the empty name) is on the device all the time.
        """
        return self is UnitStore.WORLD or self is UnitStore.HOST and name == ""

    @classmethod
    def of(cls, strategy: Strategy) -> UnitStore | None:
        """The store of single units that keeps them as a strategy keeps all of a model; None: there is none."""
        return next((store for store in cls if store.strategy is strategy.carried_out_as), None)


@dataclass(frozen=True, slots=True)
class UnitPlacement(Record):
    """The placement of one unit.

    Args:
        store: where its parameters live.
        checkpoint: whether its activations are recomputed in the backward instead of kept.
        slices: pieces in which each of its large weights is gathered, one after the other; 1: whole.
    """

    store: UnitStore = entry(member(UnitStore), default=UnitStore.NODE)
    checkpoint: bool = entry(BOOLEAN, default=False)
    slices: int = entry(integer(least=1), default=1)

    def __str__(self) -> str:
        words = [str(self.store), *["recomputed"] * self.checkpoint]
        return " ".join(words + [f"in {self.slices} slices"] * (self.slices > 1))

    def _check_together(self) -> None:
        if self.slices > 1 and not self.store.takes_slices(""):
            raise PlanError(
                f'found {self.slices} slices with store "{self.store}", expected 1: only what units of store '
                f'"{UnitStore.WORLD}" gather, and what "{UnitStore.HOST}" streams, is dropped after its use, so that '
                f'slices save memory. Use "store": "{UnitStore.WORLD}", for what is in no unit ("") also '
                f'"{UnitStore.HOST}", or leave slices out.',
                path="slices",
            )


def _units() -> Value:
    """Placements of units by the names of their modules, kept as pairs in the order of the document."""
    one = record(UnitPlacement)

    def pairs(value: Any, path: str, take: Any) -> tuple[tuple[str, UnitPlacement], ...]:
        found: Iterable[tuple[str, Any]]
        if isinstance(value, Mapping):
            found = value.items()
        elif isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            found = value
        else:
            raise PlanError(
                f"found {describe(value)}, expected an object: placements by the names of modules.", path=path
            )
        return tuple((str(name), take(placement, at_key(path, str(name)))) for name, placement in found)

    return Value(
        lambda value, path: pairs(value, path, one.accept),
        lambda value, path: pairs(value, path, one.from_document),
        lambda kept: {name: one.write(placement) for name, placement in kept},
    )


@dataclass(frozen=True, slots=True)
class ModelPlacement(Record):
    """The placement of all units of a model.

    Args:
        units: (module name, placement) of each unit; a mapping is taken, too. The name of what is in no unit, such as
            embeddings and heads, is the empty string, as in ``named_modules``.
        default: the placement of units that are not named.
        memory_limit_bytes: the limit that the placement was planned for, one a rank; None: none.
    """

    units: tuple[tuple[str, UnitPlacement], ...] = entry(_units(), default=())
    default: UnitPlacement = entry(record(UnitPlacement), default=UnitPlacement())
    memory_limit_bytes: tuple[int, ...] | None = entry(
        optional(several(integer(least=1, most=LARGEST_COUNT))), default=None, omit=True
    )

    def _check_together(self) -> None:
        for path, name, placement in (
            *((at_key("units", name), name, placement) for name, placement in self.units),
            ("default", "any", self.default),
        ):
            if placement.slices > 1 and not placement.store.takes_slices(name):
                raise PlanError(
                    f'found {placement.slices} slices with store "{placement.store}", expected them for what is in no '
                    'unit ("") alone: units are streamed one at a time. Leave slices out here; a block that shares a '
                    'parameter with what is in no unit goes with "", and is not named.',
                    path=f"{path}.slices",
                )

    def of(self, name: str) -> UnitPlacement:
        """The placement of the unit whose module has a name."""
        return dict(self.units).get(name, self.default)

    @property
    def placements(self) -> tuple[UnitPlacement, ...]:
        """All placements that units may have, the default among them."""
        return tuple(dict.fromkeys((*(placement for _, placement in self.units), self.default)))

    def __str__(self) -> str:
        """One line: each placement with the units that have it."""
        named: dict[UnitPlacement, list[str]] = {}
        for name, placement in self.units:
            named.setdefault(placement, []).append(name or "the rest")
        parts = [f"{placement}: {', '.join(names)}" for placement, names in named.items()]
        return "; ".join([*parts, f"{'others' if parts else 'all units'}: {self.default}"])

    def require_units(self, known: Iterable[str]) -> None:
        """Checks that all names are those of units of the model.

        Args:
            known: names of the model's units.

        Raises:
            PlanError: a name is not; it says which one may be meant.
        """
        known = list(known)
        for name, _ in self.units:
            if name not in known:
                some = ", ".join(f'"{unit}"' for unit in known[:12]) + (", ..." if len(known) > 12 else "")
                hint = nearest(name, known) or " Correct the name, or remove it."
                raise PlanError(
                    f"found no unit of this name in the model, expected one of {some}.{hint}",
                    path=at_key("placement.units", name),
                )


def check_placement(strategy: Strategy, placement: ModelPlacement | None, ranks: int | None) -> None:
    """Checks that a placement and the rest of its plan agree.

    Args:
        strategy: of the plan.
        placement: of the plan.
        ranks: of the plan; None: any.

    Raises:
        PlanError: the strategy has no placements, or limits are not those of the ranks.
    """
    if placement is None:
        return
    if strategy is not Strategy.OSDP:
        raise PlanError(
            f'found a placement with strategy "{strategy}", expected "{Strategy.OSDP}", the one strategy whose units '
            "differ. Set it, or leave the placement out.",
            path="placement",
        )
    limits = placement.memory_limit_bytes
    if limits is not None and ranks is not None and len(limits) != ranks:
        with located("placement"):
            raise PlanError(
                f"found {len(limits)} limits, expected {ranks}, one a rank. Correct them, or leave them out.",
                path="memory_limit_bytes",
            )
