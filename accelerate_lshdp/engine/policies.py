"""From a strategy to what FSDP2 is told: groups, resharding, offload and precision, as plain data.

Resolving needs neither a process group nor a device, so what a CUDA run would use can be looked at anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from accelerate_lshdp.engine.topology import Topology
from accelerate_lshdp.plan import Strategy


_COMPUTE_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ShardingPolicies:
    """What one strategy means on one topology.

    Attributes:
        strategy: the strategy that was resolved.
        shard_groups: groups of ranks that share one copy of the parameters; every rank is in exactly one.
        replica_groups: groups of ranks that hold the same shard and sum its gradient between nodes; every rank is in
            exactly one; groups of one rank mean that nothing travels this way.
        reshard_after_forward: whether units drop gathered parameters between forward and backward.
        gather_once_a_step: whether gathered parameters stay until the last backward of an optimizer step.
        offload: FSDP2's offload policy; the host copy is pinned only for devices that can use it.
        precision: FSDP2's precision of units; gradients are always reduced in fp32 (or the parameters' own precision).
        output_dtype: precision of the whole model's floating-point outputs, None: as computed.
        notice: what the user should know about the choice, or None.
    """

    strategy: Strategy
    shard_groups: tuple[tuple[int, ...], ...]
    replica_groups: tuple[tuple[int, ...], ...]
    reshard_after_forward: bool
    gather_once_a_step: bool
    offload: OffloadPolicy
    precision: MixedPrecisionPolicy
    output_dtype: torch.dtype | None
    notice: str | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 manages the model; ``ddp`` keeps whole parameters on every device."""
        return self.strategy is not Strategy.DDP


def shard_groups_of(strategy: Strategy, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that share one copy of the parameters.

    Nodes with different numbers of ranks cut the parameters differently, so their shards cannot be summed with each
    other; node-sharded strategies then use one rank a shard group.
    """
    world = tuple(range(topology.world_size))
    if strategy.is_world_sharded:
        return (world,)
    if strategy.is_node_sharded and not topology.is_uneven:
        return topology.node_groups
    return tuple((rank,) for rank in world)


def resolve_policies(
    strategy: Strategy,
    topology: Topology,
    *,
    device_type: str,
    mixed_precision: str = "no",
    reshard_after_forward: bool | None = None,
    pin_memory: bool | None = None,
) -> ShardingPolicies:
    """Resolves a strategy.

    Args:
        strategy: where parameters live.
        topology: nodes and ranks.
        device_type: ``"cpu"``, ``"cuda"``, ...: where the forward runs.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"`` compute.
        reshard_after_forward: overrides the strategy's own choice.
        pin_memory: whether host memory of offloaded parameters is pinned; None: if the device is not the CPU.

    Raises:
        ValueError: a precision that is not supported, or an override against the strategy.
    """
    if mixed_precision not in _COMPUTE_DTYPES:
        raise ValueError(f"mixed_precision={mixed_precision!r} is not supported; use one of {list(_COMPUTE_DTYPES)}")
    gather_once = strategy is Strategy.ZERO2
    if gather_once and reshard_after_forward:
        raise ValueError("zero2 keeps gathered parameters for the whole step; use fsdp to reshard after the forward")
    groups = shard_groups_of(strategy, topology)
    notice = None
    if strategy.is_node_sharded and topology.is_uneven:
        notice = (
            f"nodes have {list(topology.node_sizes)} ranks: shards of different sizes cannot be summed between nodes, "
            f"so {strategy.value} keeps one full copy of the parameters for each rank instead of one for each node"
        )
    compute = _COMPUTE_DTYPES[mixed_precision]
    pinned = device_type != "cpu" if pin_memory is None else pin_memory
    return ShardingPolicies(
        strategy=strategy,
        shard_groups=groups,
        replica_groups=_replica_groups(groups),
        reshard_after_forward=not gather_once if reshard_after_forward is None else reshard_after_forward,
        gather_once_a_step=gather_once,
        offload=CPUOffloadPolicy(pin_memory=pinned) if strategy.is_offloaded else OffloadPolicy(),
        precision=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None),
        output_dtype=torch.float32 if compute else None,
        notice=notice,
    )


def _replica_groups(shard_groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks with the same place in their shard group. Shard groups have equal sizes (see ``shard_groups_of``)."""
    return tuple(zip(*shard_groups, strict=True))
