# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The tensors of a model by names that are the same under every strategy, and a stream of them as full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_lshdp.checkpoint.shards import gather_full


# Segments that wrappers add to a name; the model's own names are what a checkpoint holds.
_WRAPPER_SEGMENTS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_EXTRA_STATE = "_extra_state"


@dataclass
class ModelTensors:
    """The persistent tensors of one model.

    Attributes:
        tensors: parameters and persistent buffers by name, each object once, under its first name; DTensors where the
            parameter is sharded.
        aliases: further name of a tied tensor -> its first name.
        extra_state: module name -> what its `get_extra_state` returned.
        modules: module name -> module, for those with extra state.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> ModelTensors:
        """Reads `model.state_dict`, which also brings FSDP2's modules back to their sharded state."""
        model = unwrap(model)
        result = cls()
        # `keep_vars` gives the parameters themselves: their ids tell tied ones, and nothing is copied. By state_dict,
        # so that hooks of the script and of FSDP2 are called as in any save.
        first_name: dict[int, str] = {}
        for raw_name, value in model.state_dict(keep_vars=True).items():
            name = plain_name(raw_name)
            # Extra state is whatever a module returns, tensors among others; it goes back by `set_extra_state`.
            prefix, _, last = raw_name.rpartition(".")
            if last == _EXTRA_STATE:
                result.extra_state[plain_name(prefix)] = value
                result.modules[plain_name(prefix)] = model.get_submodule(prefix)
            elif id(value) in first_name:
                result.aliases[name] = first_name[id(value)]
            else:
                first_name[id(value)] = name
                result.tensors[name] = value
        return result

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.tensors.items() if isinstance(value, nn.Parameter)}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.tensors.items() if not isinstance(value, nn.Parameter)}


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile."""
    # In any order and depth: a compiled module may be wrapped, and a wrapped one compiled.
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return model


def plain_name(name: str) -> str:
    """A parameter's name without the segments that wrappers add."""
    for segment in _WRAPPER_SEGMENTS:
        name = name.replace(segment, "")
    return name


@torch.no_grad()
def stream_full_state(
    model: nn.Module, wanted: bool = True, aliases: bool = True
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The full, unsharded state of a model, one tensor at a time (collective: every rank must run through it).

    Args:
        model: prepared or plain.
        wanted: whether this rank wants the values; the others take part and get None.
        aliases: whether a tied tensor comes under all its names (in a row, the same object) or only under the first.

    Yields:
        Name and full tensor on the CPU, which may share memory with the model.
    """
    found = ModelTensors.of(model)
    names: dict[str, list[str]] = {name: [name] for name in found.tensors}
    if aliases:
        for alias, first in found.aliases.items():
            names[first].append(alias)
    for first, tensor in found.tensors.items():
        # By all ranks, wanted or not: it is a collective. Dropped before the next one, so that a rank holds one full
        # tensor at a time.
        full = gather_full(tensor)
        value = full.cpu() if wanted else None
        del full
        for name in names[first]:
            yield name, value
