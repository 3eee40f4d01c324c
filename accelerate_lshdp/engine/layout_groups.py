# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Lets an optimizer step parameters of several layouts that the script has put into one group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class LayoutGroups:
    """The groups of an optimizer during one step: those with parameters of several layouts are cut into one a layout.

    torch's ``foreach`` and ``fused`` steps take all parameters of a group together, and refuse whole tensors beside
    sharded ones, and shards of several meshes. An optimizer's state is kept by parameter, so cutting changes nothing
    but how many kernels run. After the step the optimizer has the script's own groups again.

    Args:
        optimizer: about to step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._parts = [_by_layout(group) for group in self._groups]
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


def _by_layout(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group itself if all its parameters have one layout, else a group for each."""
    layouts: dict[Any, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        layouts.setdefault(_layout_of(parameter), []).append(parameter)
    if len(layouts) < 2:
        return [group]
    return [{**group, "params": parameters} for parameters in layouts.values()]
