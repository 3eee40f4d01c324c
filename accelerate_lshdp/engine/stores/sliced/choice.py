# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Chooses the weights of a unit that are gathered in slices; what else the unit has is gathered as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.placed_units import PlacedUnit


@dataclass(frozen=True, eq=False)
class SlicedChoice:
    """A weight that is to be gathered in slices.

    Attributes:
        name: of the parameter in the model, its first one if it is tied.
        parameter: the whole one.
        places: modules that have it, and its name in each.
        slices: in which it is gathered.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]
    slices: int


def choose_sliced(model: nn.Module, units: Sequence[PlacedUnit], ranks: int) -> list[SlicedChoice]:
    """Chooses the weights that are gathered in slices, in the order of the model.

    Args:
        model: before it is sharded.
        units: with their placements.
        ranks: that share the weights.

    Raises:
        ValueError: a unit with slices has none.
    """
    places = places_of_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slices: dict[int, int] = {}
    for unit in units:
        wanted = unit.placement.slices
        if wanted == 1:
            continue
        chosen = [p for p in unit.parameters if can_be_sliced(p, places[id(p)], wanted * ranks)]
        if not chosen:
            raise ValueError(_nothing_to_slice(model, unit, ranks))
        slices.update((id(parameter), wanted) for parameter in chosen)
    return [
        SlicedChoice(names[id(p)], p, tuple(places[id(p)]), slices[id(p)])
        for p in parameters_of(model)
        if id(p) in slices
    ]


def places_of_parameters(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter, and its name in each, by the parameter's id."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return places


def can_be_sliced(parameter: nn.Parameter, places: Sequence[tuple[nn.Module, str]], least_rows: int) -> bool:
    """Whether each slice has a row of every rank at least, and a module of the parameter computes row by row."""
    # Of a tied one any module will do: one that computes otherwise is told so in its forward.
    computes = any(name == "weight" and _computes_by_rows(module) for module, name in places)
    return computes and parameter.ndim == 2 and parameter.is_floating_point() and parameter.shape[0] >= least_rows


def _computes_by_rows(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    if isinstance(module, nn.Linear):
        # That of MultiheadAttention, which takes its weight without calling it.
        return not isinstance(module, NonDynamicallyQuantizableLinear)
    # By the class's name: a model that is not of transformers never loads its module.
    return any(ancestor.__name__ == "Conv1D" for ancestor in type(module).__mro__)


def _nothing_to_slice(model: nn.Module, unit: PlacedUnit, ranks: int) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    slices = unit.placement.slices
    found = ", ".join(f'"{names[id(module)]}"' for module in unit.modules)
    return (
        f"found unit {found} with {slices} slices and without a weight that can be in slices, expected a Linear, "
        f"Embedding or Conv1D with at least {slices * ranks} rows ({slices} slices for each of {ranks} ranks). Give "
        "it fewer slices, or leave slices out of its placement"
    )
