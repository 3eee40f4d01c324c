# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The units of a model with the placement that a plan gives each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.units import choose_blocks, choose_units


@dataclass(frozen=True)
class PlacedUnit:
    """One unit and its placement.

    Attributes:
        modules: that are gathered together; of the rest of the model, the model itself.
        parameters: of the unit, each once.
        placement: where they live.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    placement: UnitPlacement


def place_units(
    model: nn.Module, block_names: Sequence[str] | None, placement: ModelPlacement
) -> tuple[list[PlacedUnit], PlacedUnit]:
    """Finds the placement of each unit of a model.

    Args:
        model: before it is prepared.
        block_names: as for `choose_units`.
        placement: of the plan.

    Returns:
        The units in the order of registration, and the rest of the model.

    Raises:
        PlanError: the placement names a unit that the model does not have.
        ValueError: parameters that are tied have several placements.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = choose_blocks(model, block_names)
    placement.require_units([*(names[id(block)] for block in blocks), ""])
    groups = choose_units(model, block_names)
    placed = {id(module) for group in groups for module in group}
    units, taken = [], set()
    for group in groups:
        chosen = {names[id(module)]: placement.of(names[id(module)]) for module in group}
        _require_one_placement(chosen)
        parameters = tuple({id(p): p for module in group for p in parameters_of(module)}.values())
        taken.update(map(id, parameters))
        units.append(PlacedUnit(group, parameters, next(iter(chosen.values()))))
    # A block that shares a parameter with what is in no unit is a part of the rest.
    named = dict(placement.units)
    outside = [names[id(block)] for block in blocks if id(block) not in placed]
    _require_one_placement({"": placement.of(""), **{name: named[name] for name in outside if name in named}})
    rest = tuple(parameter for parameter in parameters_of(model) if id(parameter) not in taken)
    return units, PlacedUnit((model,), rest, placement.of(""))


def _require_one_placement(chosen: dict[str, UnitPlacement]) -> None:
    if len(set(chosen.values())) > 1:
        # FSDP2 itself would untie them silently where one of them stays whole.
        found = ", ".join(f'{name or "the rest of the model"}: "{each}"' for name, each in chosen.items())
        raise ValueError(
            f"found units with tied parameters in different placements ({found}), expected one placement for all of "
            "them. Give them the same store, checkpoint and slices"
        )
