# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""An optimizer's state by the names of its parameters, so that their order, sharding and grouping may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accelerate_lshdp.checkpoint.shards import laid_out_like, local_region
from accelerate_lshdp.checkpoint.tensors import SafetensorsReader, StoredTensors
from accelerate_lshdp.checkpoint.typed_json import decode, encode, join
from accelerate_lshdp.engine.stores.shared.ownership import NodeOwnership


# How a step is carried out, not what it computes: the running script's choice stands, as it fits its device.
_EXECUTION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_SAVED = _EXECUTION_OPTIONS | {"params", "param_names"}


def parameter_names(models: Sequence[Mapping[str, torch.Tensor]]) -> dict[int, str]:
    """Maps ids of parameters to their names in a checkpoint, given the parameters of each model by name."""
    # The first name stays: a parameter of two models has one entry.
    names: dict[int, str] = {}
    for index, parameters in enumerate(models):
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), f"model_{index}.{name}")
    return names


def describe(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], path: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimizer as a document and its tensors (DTensors where the state is sharded), by name.

    Raises:
        ValueError: for a parameter of no model, or state that is neither whole nor sharded like its parameter.
        NotPlainError: for state or options that are neither JSON nor tensors.
    """
    # Walked in the order of the groups, not of the state, whose order is that of the first steps and differs between
    # ranks where each steps its own parameters.
    tensors: dict[str, torch.Tensor] = {}
    groups, state = [], {}
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in _NOT_SAVED}
        group_path = join(join(path, "groups"), str(index))
        groups.append(
            {
                "parameters": [_name(parameter, names) for parameter in group["params"]],
                "options": encode(options, group_path, tensors),
            }
        )
        for parameter in group["params"]:
            if parameter in optimizer.state:
                name = _name(parameter, names)
                state[name] = _describe_state(optimizer.state[parameter], parameter, join(path, name), tensors)
    # Some optimizers keep values under keys of their own beside those under parameters.
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"groups": groups, "state": state, "other": encode(other, join(path, "other"), tensors)}, tensors


@dataclass(frozen=True)
class OptimizerLoad:
    """A saved optimizer that has been compared with the one of this run."""

    optimizer: torch.optim.Optimizer
    options: list[dict[str, Any]]
    parameters: list[tuple[torch.Tensor, dict[str, Any], dict[str, Any] | None]]
    other: dict[Any, Any]
    reader: SafetensorsReader

    def apply(self) -> None:
        """Replaces options and state; every rank reads its own part of each tensor."""
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update(options)
        self.optimizer.state.update(self.other)
        # State of parameters that another rank of the node owns stays away: this rank would hold it and never use it.
        for parameter, group, saved in self.parameters:
            self.optimizer.state.pop(parameter, None)
            ownership = NodeOwnership.of(parameter)
            if saved is not None and (ownership is None or ownership.owned):
                self.optimizer.state[parameter] = {
                    key: self._value(value, parameter, group) for key, value in saved.items()
                }

    def _value(self, saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        if "tensor" not in saved:
            return decode(saved["value"], StoredTensors(self.reader))
        if saved["like_parameter"]:
            region = local_region(parameter) if isinstance(parameter, DTensor) else None
            return laid_out_like(parameter, self.reader.read(saved["tensor"], region))
        # A copy: the reader's tensor may share pages of the file, and optimizers change their state in place.
        value = self.reader.read(saved["tensor"]).clone()
        # torch keeps step counters on the host unless the step itself runs on the device.
        on_device = value.ndim > 0 or group.get("capturable") or group.get("fused")
        return value.to(parameter.device) if on_device else value


def check(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], document: Mapping[str, Any], reader: SafetensorsReader
) -> OptimizerLoad:
    """Compares a saved optimizer with one that is about to be restored; changes nothing.

    Raises:
        ValueError: if the parameters differ, are grouped so that their saved options contradict each other, or saved
            state does not have the shape of its parameter.
    """
    saved_group = {name: index for index, group in enumerate(document["groups"]) for name in group["parameters"]}
    saved_options = [decode(group["options"], StoredTensors(reader)) for group in document["groups"]]
    current = {_name(parameter, names) for group in optimizer.param_groups for parameter in group["params"]}
    compare_names("optimizer parameters", saved_group.keys(), current)
    options, parameters = [], []
    for index, group in enumerate(optimizer.param_groups):
        group_names = [_name(parameter, names) for parameter in group["params"]]
        candidates = sorted({saved_group[name] for name in group_names})
        if not candidates and index < len(saved_options):
            candidates = [index]  # a group without parameters has only its place
        # Groups may have been split or joined since, as long as one set of options fits all parameters of a group.
        documents = [document["groups"][candidate]["options"] for candidate in candidates]
        if any(other != documents[0] for other in documents):
            raise ValueError(
                f"parameter group {index} joins parameters that were saved in groups {candidates} with different "
                "options; build the optimizer with the groups it was saved with"
            )
        found = dict(saved_options[candidates[0]]) if candidates else {}
        for key, value in found.items():
            if not _can_replace(value, group.get(key)):
                raise ValueError(f"option {key!r} of parameter group {index} is {value!r:.60} in the checkpoint")
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                found[key] = value.to(group[key].device)
        options.append(found)
        for parameter, name in zip(group["params"], group_names, strict=True):
            saved = document["state"].get(name)
            for key, value in (saved or {}).items():
                if value.get("like_parameter"):
                    check_shape(f"optimizer state {key!r} of {name}", reader.entry(value["tensor"]).shape, parameter)
            parameters.append((parameter, group, saved))
    return OptimizerLoad(optimizer, options, parameters, decode(document["other"], StoredTensors(reader)), reader)


def _can_replace(saved: object, current: object) -> bool:
    """Whether a saved option is of the kind of the one that it replaces; None and unknown kinds say nothing."""
    if isinstance(current, (int, float, torch.Tensor)):
        return isinstance(saved, (int, float, torch.Tensor))
    if isinstance(current, (tuple, list)):
        alike = isinstance(saved, (tuple, list)) and len(saved) == len(current)
        return alike and all(map(_can_replace, saved, current))
    return not isinstance(current, str) or isinstance(saved, str)


def compare_names(what: str, saved: set[str], current: set[str]) -> None:
    """Raises ValueError naming what is missing in the checkpoint and what is unexpected in it."""
    missing, unexpected = sorted(current - saved), sorted(saved - current)
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint's {what} are not those of this run: missing {_some(missing)}, "
            f"unexpected {_some(unexpected)}"
        )


def check_shape(what: str, saved: tuple[int, ...], current: torch.Tensor) -> None:
    """Raises ValueError if a saved full tensor and the current one have different shapes."""
    if saved != tuple(current.shape):
        raise ValueError(f"{what} has shape {list(saved)} in the checkpoint and {list(current.shape)} in this run")


def _describe_state(
    state: Mapping[str, Any], parameter: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    described = {}
    for key, value in state.items():
        here = join(path, str(key))
        if not isinstance(value, torch.Tensor):
            described[key] = {"value": encode(value, here, tensors)}
            continue
        # What has the parameter's shape is cut like it in another layout; anything else (a step count) is whole
        # everywhere. A scalar parameter's moments have its shape, too, and need no cutting.
        like_parameter = value.shape == parameter.shape and value.ndim > 0
        sharded = isinstance(parameter, DTensor) and value.ndim > 0
        if sharded and not (like_parameter and _same_layout(value, parameter)):
            raise ValueError(
                f"{here} is a tensor of shape {list(value.shape)} beside a sharded parameter of shape "
                f"{list(parameter.shape)}; a checkpoint holds scalars and state that is sharded like its parameter"
            )
        if isinstance(value, DTensor) and not like_parameter:
            raise ValueError(f"{here} is sharded, but has not the shape of its parameter")
        encode(value, here, tensors)
        described[key] = {"tensor": here, "like_parameter": like_parameter}
    return described


def _same_layout(value: torch.Tensor, parameter: DTensor) -> bool:
    if isinstance(value, DTensor):
        return value.device_mesh == parameter.device_mesh and value.placements == parameter.placements
    # Some optimizers make plain tensors as the state of DTensors.
    with torch.no_grad():  # the whole tensor, where the mesh has one rank
        return parameter.to_local().shape == parameter.shape == value.shape


def _name(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise ValueError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that belongs to none of the models; "
            "prepare its model together with the optimizer, or build the optimizer from the prepared model"
        )
    return names[id(parameter)]


def _some(names: list[str], limit: int = 8) -> str:
    if not names:
        return "none"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
