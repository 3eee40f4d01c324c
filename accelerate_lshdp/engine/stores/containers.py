# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Tensors in what a module's forward takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


_DEPTH = 4


def change_tensors(value: Any, change: Callable[[torch.Tensor, bool], torch.Tensor], may_change: bool = False) -> Any:
    """A value with other tensors in the place of its own: itself, and those in tuples, lists and dictionaries.

    Containers of other classes stay as they are: a cache that a forward fills has to be the caller's. So do those in
    which nothing changes.

    Args:
        value: an argument of a forward.
        change: the tensor that takes the place of one, given it and whether it is in a container that the forward may
            change, which then should stay as it is if possible.
        may_change: whether the value is in such a container.
    """
    if isinstance(value, torch.Tensor):
        return change(value, may_change)
    if type(value) in (tuple, list):
        may_change = may_change or type(value) is list
        changed = [change_tensors(each, change, may_change) for each in value]
        same = all(new is old for new, old in zip(changed, value, strict=True))
        return value if same else type(value)(changed)
    if type(value) is dict:
        changed = {name: change_tensors(each, change, True) for name, each in value.items()}
        return value if all(changed[name] is each for name, each in value.items()) else changed
    return value


def tensors_in(value: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """The tensors in what a forward returns: in containers, and in attributes of objects of the script."""
    if isinstance(value, torch.Tensor):
        return [value]
    # Most values are numbers, names and the like.
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (tuple, list, set)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
        slots = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
        names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
        parts += [getattr(value, name, None) for name in names]
    return [tensor for part in parts for tensor in tensors_in(part, depth - 1)]
