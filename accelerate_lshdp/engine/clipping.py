# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Clips gradients of parameters that are whole, sharded or shared inside a node.

Torch's own ``clip_grad_norm_`` does not work on parameters of different meshes. The norm is taken over each rank's own
shard, combined over the ranks that share a copy, and is then the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from accelerate_lshdp.engine.stores.shared.ownership import NodeOwnership
from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction
from accelerate_lshdp.engine.stores.shared.table import BarrierPurpose
from accelerate_lshdp.runtime.profiler_labels import label


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales gradients in place so that their joint norm is at most ``max_norm`` (collective over shard groups).

    Args:
        parameters: parameters with ``.grad``, plain tensors or DTensors; those without a gradient are passed over.
        max_norm: the largest norm allowed.
        norm_type: order of the norm; ``inf`` for the largest absolute value.

    Returns:
        The norm before clipping, a scalar tensor, the same on all ranks. The scale is
        ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    parameters = [p for p in parameters if p.grad is not None]
    with label("clip_gradients"):
        # On nodes that share gradients this is a barrier, too: no rank scales before all have read.
        total = total_norm(parameters, norm_type)
        # A tensor, and multiplied with even where it is 1: looking at its value would make the host wait for a device.
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for local in own_gradients(parameters):
            local.mul_(scale.to(local.device, local.dtype))
        node_barrier(parameters)
    return total


def total_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The joint norm of the gradients of parameters that have one; a scalar tensor.

    Collective over the shard groups of those that are sharded, and over the nodes of those that nodes share.
    """
    # Dictionaries keep the order of the parameters, which is the same on all ranks: so all ranks start the collectives
    # of several meshes in the same order.
    norm_type = float(norm_type)
    by_mesh: dict[object, list[torch.Tensor]] = {}
    by_node: dict[NodeReduction, list[tuple[NodeOwnership, torch.Tensor]]] = {}
    for parameter in parameters:
        gradient, ownership = parameter.grad, NodeOwnership.of(parameter)
        if ownership is not None:
            by_node.setdefault(ownership.reduction, []).append((ownership, gradient))
            continue
        sharded = isinstance(gradient, DTensor) and any(isinstance(p, Shard) for p in gradient.placements)
        by_mesh.setdefault(gradient.device_mesh if sharded else None, []).append(_local(gradient))
    parts = [_over_node(reduction, shared, norm_type) for reduction, shared in by_node.items()]
    if not by_mesh and not parts:
        return torch.tensor(0.0)
    for mesh, locals_ in by_mesh.items():
        part = _power_sum(locals_, norm_type)
        if mesh is not None and mesh.size() > 1:
            part = _over_mesh(part, mesh, norm_type)
        parts.append(part)
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1 / norm_type)


def _power_sum(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Sum of |x|^p over the tensors (their maximum for p = inf), in at least fp32."""
    # The square of a gradient of 256 is more than fp16 can hold, and bf16 has 8 bits to add up with.
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype.to_real())
    norms = [
        torch.linalg.vector_norm(t, norm_type, dtype=torch.promote_types(t.dtype, dtype)) for t in tensors if t.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=dtype, device=tensors[0].device)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _over_node(
    reduction: NodeReduction, shared: list[tuple[NodeOwnership, torch.Tensor]], norm_type: float
) -> torch.Tensor:
    """The power sum of gradients that a node shares: each rank sums those that it owns.

    The parts are added parameter by parameter, so that nodes with different numbers of ranks get the same bits.
    """
    # Each part alone, as a double, which holds an fp32 exactly: rounding happens in one place, the sum below, in the
    # order of the parameters.
    own = {owner.index: _power_sum([gradient], norm_type) for owner, gradient in shared if owner.owned}
    posted = reduction.exchange({index: float(part) for index, part in own.items()})
    dtype = torch.float32
    for _, gradient in shared:
        dtype = torch.promote_types(dtype, gradient.dtype.to_real())
    parts = torch.tensor([posted[owner.index] for owner, _ in shared], dtype=torch.float64).to(dtype)
    return parts.max() if math.isinf(norm_type) else parts.sum()


def _over_mesh(part: torch.Tensor, mesh: object, norm_type: float) -> torch.Tensor:
    """Combines each rank's part over its shard group; host tensors travel through the mesh's device."""
    # Gradients of offloaded parameters are on the host, and the mesh's group may know its device only (NCCL).
    staged = part.to(mesh.device_type)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    dist.all_reduce(staged, op=op, group=mesh.get_group())
    return staged.to(part.device)


@torch.no_grad()
def clip_grad_value(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamps every gradient element to [-clip_value, clip_value] in place (collective over nodes that share them)."""
    parameters = [p for p in parameters if p.grad is not None]
    with label("clip_gradients"):
        node_barrier(parameters)  # another rank of the node may still be looking at them as they were
        for local in own_gradients(parameters):
            local.clamp_(-clip_value, clip_value)
        node_barrier(parameters)


def own_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The gradients that this rank changes: its shards, whole ones, and those of its node's that it owns."""
    for parameter in parameters:
        ownership = NodeOwnership.of(parameter)
        if ownership is None:
            yield _local(parameter.grad)
        elif ownership.owned:
            yield parameter.grad.data  # does not count as a change by the script, which is refused


def node_barrier(parameters: Iterable[torch.Tensor], purpose: BarrierPurpose = BarrierPurpose.CLIPPING) -> None:
    """Waits until all ranks of the node are here, so that none reads shared gradients while another changes them."""
    owned = [NodeOwnership.of(parameter) for parameter in parameters]
    for reduction in dict.fromkeys(ownership.reduction for ownership in owned if ownership is not None):
        reduction.changes += 1
        reduction.barrier(purpose)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
