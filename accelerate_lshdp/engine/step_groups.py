# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Cuts an optimizer's groups for a step: into parts of one layout, and on devices into parts of bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accelerate_lshdp.documents.step_memory import STEPPED_TOGETHER


#: Optimizers of torch that update each parameter independently of all others, and whose ``foreach`` kernels allocate
#: temporary memory for a whole group. Subclasses may do something else.
_STEPPED_ONE_BY_ONE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


class StepGroups:
    """The groups of an optimizer during one step, some of them cut into parts.

    torch's ``foreach`` and ``fused`` steps take all parameters of a group together, and refuse whole tensors beside
    sharded ones, and shards of several meshes: such a group is cut into one part a layout.

    What ``foreach`` computes of a group exists for all of its parameters at a time: AdamW's has 4 bytes for each of
    them, and is what torch chooses on devices. There a group is cut into parts of `STEPPED_TOGETHER` bytes, or of one
    parameter that has more. Parameters in host memory, which ranks of a node divide among them, are in parts of their
    own: torch would else choose kernels for those on the device by which of these a rank steps.

    An optimizer's state is kept by parameter, so cutting changes no arithmetic. After the step the optimizer has the
    script's own groups again.

    Args:
        optimizer: about to step.
        may_bound_memory: whether groups may be cut for the sake of memory, too: nothing of the script looks at them
            before `restore`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, may_bound_memory: bool = True) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        is_bounded = may_bound_memory and type(optimizer) in _STEPPED_ONE_BY_ONE
        self._parts = [_parts_of(group, is_bounded) for group in self._groups]
        self._are_cut = any(len(parts) > 1 for parts in self._parts)
        if self._are_cut:
            # The list itself, not its items: schedulers and loggers of the script may hold the groups.
            optimizer.param_groups = [part for parts in self._parts for part in parts]

    def restore(self) -> None:
        """Gives the optimizer its groups again, with what the step has written into them."""
        if not self._are_cut:
            return
        for group, parts in zip(self._groups, self._parts, strict=True):
            if parts[0] is not group:
                # Counters that an optimizer keeps in its groups have gone on alike in all parts.
                group.update({name: value for name, value in parts[0].items() if name != "params"})
        added = self._optimizer.param_groups[sum(map(len, self._parts)) :]  # by a script whose step has failed
        self._groups.extend(added)
        self._optimizer.param_groups = self._groups


@contextlib.contextmanager
def zeroed_one_by_one(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Lets ``zero_grad(set_to_none=False)`` inside the block set gradients of several layouts to zero.

    torch takes those of all groups together where the optimizer's defaults say ``foreach`` or ``fused``.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len({_layout_of(parameter) for parameter in parameters}) < 2:
        yield
        return
    before = optimizer.defaults
    optimizer.defaults = {**before, "foreach": False, "fused": False}
    try:
        yield
    finally:
        optimizer.defaults = before


def _layout_of(parameter: torch.Tensor) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _parts_of(group: dict[str, Any], is_bounded: bool) -> list[dict[str, Any]]:
    """The group itself if it need not be cut, else its parts."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        device = parameter.device.type if is_bounded else None
        alike.setdefault((_layout_of(parameter), device), []).append(parameter)
    parts = list(alike.values())
    if is_bounded:
        parts = [
            piece
            for part in parts
            for piece in (_pieces_of(part) if _is_stepped_together(group, part[0].device.type) else [part])
        ]
    return [group] if len(parts) < 2 else [{**group, "params": parameters} for parameters in parts]


def _is_stepped_together(group: dict[str, Any], device: str) -> bool:
    """Whether torch computes for all parameters of a group on a device at a time, in memory of its own."""
    if group.get("fused") or group.get("differentiable") or group.get("foreach") is False:
        return False
    return bool(group.get("foreach")) or device != "cpu"


def _pieces_of(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Neighbours that have `STEPPED_TOGETHER` bytes on this rank at most; a larger parameter is alone."""
    pieces: list[list[torch.Tensor]] = []
    room = 0
    with torch.no_grad():  # so that taking the local part of a parameter is no operation of autograd
        for parameter in parameters:
            own = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
            if not pieces or own > room:
                pieces.append([])
                room = STEPPED_TOGETHER
            pieces[-1].append(parameter)
            room -= own
    return pieces
