# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Policies of a strategy on a topology: groups, resharding, offload and precision, as plain data.

Resolving needs neither a process group nor a device, so what a CUDA run would use can be looked at anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.documents.strategy import Gathered, SharedBy, Strategy
from accelerate_lshdp.engine.stores.shared.memory import NodeMemory
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.topology import Topology


_COMPUTE_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Mechanism(str, Enum):
    """How a strategy keeps a model's parameters and sums their gradients."""

    REPLICATED = "replicated"  # whole parameters in the memory of each rank, gradients in buckets
    NODE_SHARED = "node_shared"  # one copy a node, in memory that its ranks map
    STREAMED = "streamed"  # one copy a node in such memory, and on the device while it is computed with
    FSDP2 = "fsdp2"


@dataclass(frozen=True, slots=True)
class ShardingPolicies:
    """The policies that one strategy resolves to on one topology.

    Attributes:
        strategy: the strategy that was resolved.
        mechanism: what carries it out.
        shard_groups: groups of ranks that share one copy of the parameters; every rank is in exactly one.
        replica_groups: groups of ranks, one a node, that sum gradients between nodes: those of the shard that they
            hold, or of some of the buffers that the ranks of their node have summed; every rank is in exactly one
            (where nodes have different numbers of ranks: in at least one); groups of one rank mean that nothing
            travels this way.
        reshard_after_forward: whether units drop gathered parameters between forward and backward.
        gather_once_a_step: whether gathered parameters stay until the last backward of an optimizer step.
        offload: FSDP2's offload policy; the host copy is pinned only for devices that can use it.
        precision: FSDP2's precision of units; gradients are always reduced in fp32 (or the parameters' own precision).
        output_dtype: precision of the whole model's floating-point outputs, None: as computed.
        shares_memory: whether ranks of a node can sum, in memory that all of them map, gradients that each has whole.
        notice: what the user should know about the choice, or None.
        of_stores: the policies of each store that units of the model may have, where these differ; empty: all units
            follow the policies above.
        reshards_to_node: whether units keep the shards of the node's copy after the forward.
    """

    strategy: Strategy
    mechanism: Mechanism
    shard_groups: tuple[tuple[int, ...], ...]
    replica_groups: tuple[tuple[int, ...], ...]
    reshard_after_forward: bool
    gather_once_a_step: bool
    offload: OffloadPolicy
    precision: MixedPrecisionPolicy
    output_dtype: torch.dtype | None
    shares_memory: bool
    notice: str | None = None
    of_stores: Mapping[UnitStore, ShardingPolicies] = field(default_factory=dict)
    reshards_to_node: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 manages parameters of the model; otherwise they are whole tensors on every rank."""
        return self.mechanism is Mechanism.FSDP2

    @property
    def casts_itself(self) -> bool:
        """Whether units cast what they compute with; otherwise the whole model computes under autocast."""
        return self.mechanism in (Mechanism.FSDP2, Mechanism.STREAMED)

    @property
    def is_offloaded(self) -> bool:
        """Whether optimizers step parameters in host memory."""
        return self.strategy.is_offloaded or UnitStore.HOST in self.of_stores

    @property
    def starts_on_host(self) -> bool:
        """Whether a model is placed from host memory, as its units come to the device one by one."""
        return self.casts_itself and self.strategy.is_offloaded


def choose_mechanism(strategy: Strategy, topology: Topology, device_type: str, intra_node: str) -> Mechanism:
    """Chooses the mechanism for a strategy on a topology.

    On CPUs host memory is device memory, so a node's copy of the parameters need not be gathered block by block: its
    ranks map it, and a rank that has its node for itself keeps it as it is. Ranks with devices copy from it block by
    block, if the strategy keeps it in host memory.

    Raises:
        ValueError: shared memory is demanded where there is none.
    """
    if topology.mixes_devices:
        return _mixed_mechanism(strategy, topology, device_type, intra_node)
    streams = device_type != "cpu" and strategy.is_node_sharded and strategy.is_offloaded
    if intra_node == "shared_memory" and strategy.is_node_sharded:
        on_device = device_type != "cpu" and not streams
        reason = f"the ranks train on {device_type}" if on_device else NodeMemory.missing()
        if reason is not None:
            raise ValueError(
                f"intra_node='shared_memory' cannot be used: {reason}; use 'auto' or 'collectives' in "
                f"{option_advice('intra_node')}"
            )
    if strategy.traits.shared_by is SharedBy.NOBODY or (device_type == "cpu" and topology.world_size == 1):
        return Mechanism.REPLICATED
    if streams and intra_node != "collectives" and NodeMemory.missing() is None:
        return Mechanism.STREAMED
    if device_type != "cpu" or not strategy.is_node_sharded or intra_node == "collectives":
        return Mechanism.FSDP2
    # A rank that has its node for itself holds the node's one copy: whole parameters, with nothing to share.
    if max(topology.node_sizes) == 1:
        return Mechanism.REPLICATED
    return Mechanism.NODE_SHARED if NodeMemory.missing() is None else Mechanism.FSDP2


def _mixed_mechanism(strategy: Strategy, topology: Topology, device_type: str, intra_node: str) -> Mechanism:
    """The mechanism of this rank where nodes have different types of devices, so that gradients meet on the hosts.

    Raises:
        ValueError: the strategy does not keep gradients in memory that the ranks of a node map.
    """
    missing = NodeMemory.missing()
    if not (strategy.is_node_sharded and strategy.is_offloaded) or intra_node == "collectives" or missing is not None:
        found = f"strategy {strategy}, ranks of a node that meet by {intra_node}"
        raise ValueError(
            f"found nodes with devices of types {', '.join(topology.device_types)} and {found}"
            + (f", and {missing}" if missing else "")
            + ", expected strategy lsdp with gradients in memory that a node shares: different devices can exchange "
            f"gradients only over their hosts. Use {option_advice('intra_node', 'auto')}"
        )
    # Also where a rank has its node for itself: its buckets have to be those of the other nodes.
    return Mechanism.NODE_SHARED if device_type == "cpu" else Mechanism.STREAMED


def shard_groups_of(strategy: Strategy, topology: Topology, mechanism: Mechanism) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that share one copy of the parameters.

    Under FSDP2, nodes with different numbers of ranks cut the parameters differently, so their shards cannot be summed
    with each other; node-sharded strategies then use one rank a shard group.
    """
    world = tuple(range(topology.world_size))
    if strategy.is_world_sharded:
        return (world,)
    if mechanism in (Mechanism.NODE_SHARED, Mechanism.STREAMED) or (
        strategy.is_node_sharded and not topology.is_uneven
    ):
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
    intra_node: str = "auto",
) -> ShardingPolicies:
    """Resolves a strategy.

    Args:
        strategy: where parameters live.
        topology: nodes and ranks.
        device_type: ``"cpu"``, ``"cuda"``, ...: where the forward runs.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"`` compute.
        reshard_after_forward: overrides the strategy's own choice.
        pin_memory: whether host memory of offloaded parameters is pinned; None: if the device is not the CPU.
        intra_node: as for ``choose_mechanism``.

    Raises:
        ValueError: a precision that is not supported, or an override against the strategy or the device.
    """
    if mixed_precision not in _COMPUTE_DTYPES:
        raise ValueError(
            f"mixed_precision={mixed_precision!r} is not supported; use one of "
            f"{list(_COMPUTE_DTYPES)} in Accelerator(mixed_precision=...) or {option_advice('mixed_precision')}"
        )
    gathered = strategy.traits.gathered
    reshards = gathered is Gathered.EACH_PASS
    if reshard_after_forward and not reshards:
        raise ValueError(
            f"found reshard_after_forward=True with {strategy}, which keeps gathered parameters after the forward; "
            "use fsdp to reshard"
        )
    mechanism = choose_mechanism(strategy, topology, device_type, intra_node)
    groups = shard_groups_of(strategy, topology, mechanism)
    notice = None
    if strategy.carried_out_as is not strategy:
        notice = (
            f"{strategy} is carried out as {strategy.carried_out_as}: parameters and gradients are divided among all "
            "ranks, too, not the optimizer states alone. That sends as much and needs less memory"
        )
    if strategy.is_node_sharded and topology.is_uneven and mechanism is Mechanism.FSDP2:
        notice = (
            f"nodes have {list(topology.node_sizes)} ranks: shards of different sizes cannot be summed between nodes, "
            f"so {strategy.value} keeps one full copy of the parameters for each rank instead of one for each node"
        )
    compute = _COMPUTE_DTYPES[mixed_precision]
    pinned = device_type != "cpu" if pin_memory is None else pin_memory
    return ShardingPolicies(
        strategy=strategy,
        mechanism=mechanism,
        shard_groups=groups,
        # Whole copies are summed inside their node first, so between nodes they travel as a node's shards do.
        replica_groups=replica_groups(groups if strategy.is_world_sharded else topology.node_groups),
        reshard_after_forward=reshards if reshard_after_forward is None else reshard_after_forward,
        gather_once_a_step=gathered is Gathered.EACH_STEP,
        offload=CPUOffloadPolicy(pin_memory=pinned) if strategy.is_offloaded else OffloadPolicy(),
        # Gradients are summed in fp32, whatever precision computes: accelerate's own policy would sum them in 16 bits.
        # Only the root converts its output: FSDP2's output_dtype on a block would hand fp32 to the next block.
        precision=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None),
        output_dtype=torch.float32 if compute else None,
        shares_memory=(
            device_type == "cpu"
            and intra_node != "collectives"
            and max(topology.node_sizes) > 1
            and NodeMemory.missing() is None
        ),
        notice=notice,
    )


def replica_groups(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with the same place in their groups; in smaller ones ranks take several places in turn."""
    places = range(max(map(len, groups)))
    return tuple(tuple(group[place % len(group)] for group in groups) for place in places)
