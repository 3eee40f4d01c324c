# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Hooks for ``load_state_dict`` of prepared models, and of parts of them, whose parameters are shared or sharded.

All ranks call it together, with whole tensors, as where each rank has a model for itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from accelerate_lshdp.engine.module_state import exclude_hooks_from_pickles
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.failures import failures_explained


class _Loading:
    """The hooks of all modules of a prepared model that torch calls before and after it loads each of them."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared = weakref.ref(prepared)
        self._loaded: weakref.ref[nn.Module] | None = None  # the module that is loaded now, with all its parts

    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        prepared = self._prepared()
        if prepared is None:
            return
        # The module that the script has called, or the whole model inside of another module that it has called.
        if not prefix or module is prepared.module:
            self._loaded = weakref.ref(module)
            prepared.loading_begins(state)
        cut_whole_tensors(module, state, prefix)

    def after(self, module: nn.Module, _: Any) -> None:
        prepared = self._prepared()
        # Once for all parts: torch calls this for each of them, and for the module that holds them last.
        if prepared is not None and self._loaded is not None and self._loaded() is module:
            self._loaded = None
            prepared.parameters_loaded()


def follow_loading(prepared: PreparedModel) -> None:
    """Lets a prepared model know when a state is loaded into any part of it."""
    loading = _Loading(prepared)
    for module in prepared.module.modules():
        prepared.attachments.add(
            module.register_load_state_dict_pre_hook(loading.before),
            module.register_load_state_dict_post_hook(loading.after),
        )
        exclude_hooks_from_pickles(module)


def cut_whole_tensors(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Gives a module's own sharded parameters this rank's shards of the whole tensors in a state (no collective)."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        # Torch itself tells of another shape.
        if whole and isinstance(parameter, DTensor) and value.shape == parameter.shape:
            mesh, placements = parameter.device_mesh, parameter.placements
            # Without a source rank each rank cuts its own tensor. The default scatters that of rank 0, in a collective
            # for each parameter, though all ranks have the same.
            state[prefix + name] = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)


def require_same_names(state: dict[str, Any]) -> None:
    """Checks that all ranks load the same parameters (collective): each one keeps its shards only.

    Raises:
        RuntimeError: on all ranks, if they do not.
    """
    names = sorted(state)
    if not dist.is_initialized():
        return
    everyone: list[list[str] | None] = [None] * dist.get_world_size()
    with failures_explained():
        dist.all_gather_object(everyone, names)
    if any(others != names for others in everyone):
        numbers = ", ".join(f"rank {rank}: {len(others)}" for rank, others in enumerate(everyone))
        raise RuntimeError(
            f"found load_state_dict of a sharded model with other tensors on some ranks than on others ({numbers}). "
            "Each rank takes its shards of the whole tensors: load the same state dict on all ranks "
            "(accelerator.get_state_dict gives it to one rank of each node)"
        )
