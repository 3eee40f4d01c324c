# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Converts between what a rank holds of a tensor (all, or a shard of a DTensor) and the full one of a checkpoint."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard


@torch.no_grad()
def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers the unsharded tensor, on the tensor's or its mesh's device (collective over the mesh of a DTensor)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = tensor.to_local()
    mesh = tensor.device_mesh
    if local.device.type != mesh.device_type:
        # Parameters offloaded to the host: the mesh's backend may carry tensors of its own device only.
        tensor = DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.detach().full_tensor()


def local_region(tensor: DTensor) -> tuple[slice, ...]:
    """The region of the full tensor that this rank's shard is: a slice for each dimension; it may be empty.

    Raises:
        ValueError: the rank is not in the tensor's mesh, or holds another part than its placements say.
        NotImplementedError: for placements other than Shard and Replicate.
    """
    starts, stops = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not part of the mesh {tensor.device_mesh} of a tensor that it holds")
    for dimension, (placement, index) in enumerate(zip(tensor.placements, coordinate, strict=True)):
        if type(placement) is Shard:  # its subclasses place elements elsewhere
            # The rule of torch.chunk: equal chunks, rounded up; the last ones may be short or empty.
            size = stops[placement.dim] - starts[placement.dim]
            chunk = -(-size // tensor.device_mesh.size(dimension))
            end = stops[placement.dim]
            starts[placement.dim] = min(starts[placement.dim] + chunk * index, end)
            stops[placement.dim] = min(starts[placement.dim] + chunk, end)
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(
                f"a tensor of shape {list(tensor.shape)} is placed as {placement}, neither Shard nor Replicate"
            )
    # Compared with what torch has cut: if a version of it rounds in another way, this is an error and no wrong value.
    region = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
    expected = [part.stop - part.start for part in region]
    with torch.no_grad():
        found = list(tensor.to_local().shape)
    if found != expected:
        raise ValueError(f"a shard of {list(tensor.shape)} should be {expected} under {tensor.placements}, is {found}")
    return region


@torch.no_grad()
def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrites this rank's part of `target` (plain or DTensor) by `source`, which is that part."""
    # A plain parameter by its data: it may be one that a node shares, where changes by the script are counted.
    local = target.to_local() if isinstance(target, DTensor) else target.data
    local.copy_(source)


@torch.no_grad()
def laid_out_like(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A new tensor with `source`'s values and dtype, placed as `target` is; `source` is this rank's part."""
    local = target.to_local() if isinstance(target, DTensor) else target
    # A copy, since `source` may be pages of the file.
    mine = torch.empty(source.shape, dtype=source.dtype, device=local.device)
    mine.copy_(source)
    if not isinstance(target, DTensor):
        return mine
    return DTensor.from_local(
        mine,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
