# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Weights of prepared models for use elsewhere, by plain ``from_pretrained`` for example."""

from __future__ import annotations

import os

import torch
from accelerate.utils.constants import SAFE_WEIGHTS_NAME
from torch import nn

from accelerate_lshdp.accelerator.run_checkpoints import layout_of
from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.checkpoint.run_state import save_model_file, stream_full_state
from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.runtime.agreement import tell_of_missing_ranks


def full_state(session: Session, model: nn.Module) -> dict[str, torch.Tensor]:
    """The full, unsharded state of a model on the CPU of one rank a node; empty on the others (collective)."""
    tell_of_missing_ranks("get_state_dict")
    wanted = session.topology.local_rank == 0
    state = dict(stream_full_state(model, wanted))
    return state if wanted else {}


def fits_one_file(model: nn.Module, max_shard_size: int | str) -> bool:
    """Whether the weights of a model can be written tensor by tensor into one file.

    Args:
        model: not wrapped.
        max_shard_size: bytes, or like ``5GB``.

    Raises:
        ValueError: ``max_shard_size`` is something else.
    """
    # Parameters on the meta device are offloaded by accelerate's own hooks, which know where they are; or lost.
    elsewhere = any(tensor.is_meta for tensor in parameters_of(model))
    return not elsewhere and _bytes_of(model) <= _parse_size(max_shard_size)


def write_weights(session: Session, model: nn.Module, folder: str | os.PathLike[str], writes: bool) -> None:
    """Writes the weights of a model into one safetensors file, without a full copy in memory.

    It is collective where the model is sharded. Else the main process may call it alone, as scripts do.

    Args:
        session: of this rank.
        model: not wrapped.
        folder: of the file.
        writes: whether this rank writes it.
    """
    is_collective = session.policies.is_sharded
    if is_collective:
        tell_of_missing_ranks("save_model")
    save_model_file(os.path.join(folder, SAFE_WEIGHTS_NAME), model, layout_of(session), writes, is_collective)


def _bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in [*parameters_of(model), *model.buffers()])


def _parse_size(size: int | str) -> int:
    if isinstance(size, int):
        return size
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    unit = size[-2:].upper()
    if unit not in units:
        raise ValueError(f"max_shard_size={size!r} should be a number of bytes, or like '5GB'")
    return int(float(size[:-2]) * units[unit])
