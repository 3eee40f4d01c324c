# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gathers tensors whose first dimension differs between ranks, as it does with unequal batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply

from accelerate_lshdp.runtime.groups import carried


def gather_unequal(data: Any) -> Any:
    """Concatenates tensors of all ranks along the first dimension (collective).

    Stock accelerate assumes equal shapes and returns garbage on rank 0 otherwise, without an error.

    Args:
        data: a tensor or nested lists, tuples and dictionaries of tensors; shapes may differ in the first dimension.

    Returns:
        The same structure, first dimensions summed over ranks in rank order; scalars become shape (world,).

    Raises:
        ValueError: on all ranks, if numbers of dimensions, other dimensions or dtypes differ.
    """
    return recursively_apply(_gather_one, data, error_on_other_type=True)


def _gather_one(tensor: torch.Tensor) -> torch.Tensor:
    # Collectives here have no backward; and a scalar has no first dimension along which to join.
    tensor = tensor.detach()
    if tensor.ndim == 0:
        tensor = tensor[None]
    tensor = tensor.contiguous()
    # Shapes first: collectives need equal ones, and ranks whose tensors cannot be joined have to raise all together.
    # The dtype as text, as a rank may not know how to read another one's object.
    described: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(described, (tuple(tensor.shape), str(tensor.dtype)))
    if len({(shape[1:], dtype) for shape, dtype in described}) > 1:
        raise ValueError(
            f"gather found shapes and dtypes {described} on the ranks; only the first dimension may differ. Use "
            "accelerator.pad_across_processes first"
        )
    lengths = [shape[0] for shape, _ in described]
    longest = max(lengths)
    # Booleans are not reduced or gathered by every backend; they travel as bytes.
    travelling = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    # Padded to the longest: backends gather equal sizes only. All ranks cut the padding off by the same lengths.
    padded = travelling.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = travelling
    padded = carried(padded)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    pieces = [piece[:length] for piece, length in zip(received, lengths, strict=True)]
    return torch.cat(pieces).to(tensor.device, tensor.dtype)
