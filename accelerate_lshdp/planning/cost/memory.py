# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory that a strategy needs on each rank, by the accounting of ZeRO (Rajbhandari et al., 2020, section 3).

With P parameters and Adam, a rank that holds everything keeps P * (parameter + gradient + optimizer) bytes: 16 * P, in
fp32 as 4 + 4 + 8, in ZeRO's mixed precision as 2 + 2 + 12. Where n ranks share one copy, each keeps 1/n of that, and
beside it the gathered parameters: two units and the root (one unit is computed, the next one gathered), and the
gradient of one unit before it is reduced. Activations come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.collectives import group_sizes
from accelerate_lshdp.documents.strategy import Gathered, SharedBy, strategy_traits
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one parameter in each of its roles.

    Args:
        parameter: bytes that are kept between steps.
        gradient: bytes of the reduced gradient that the optimizer reads.
        optimizer: bytes of Adam's two moments, and of an fp32 master copy where `parameter` is not one.
        gathered: bytes of the parameter in the precision of the forward.
        unreduced: bytes of the gradient that the backward leaves.
    """

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 8
    gathered: float = 4
    unreduced: float = 4


#: What the engine keeps, by `mixed_precision` of accelerate. The parameters that are kept stay in fp32.
STATE_BYTES = {
    "no": StateBytes(),
    "bf16": StateBytes(gathered=2, unreduced=2),
    "fp16": StateBytes(gathered=2, unreduced=2),
}
#: ZeRO's: parameters and gradients in fp16; the optimizer keeps the fp32 master copy.
ZERO_BYTES = StateBytes(parameter=2, gradient=2, optimizer=12, gathered=2, unreduced=2)


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Numbers of a model's parameters.

    Args:
        parameters: all parameters, tied ones once.
        trainable: parameters with gradients and optimizer states.
        units: parameters of each unit, in the order of the forward; the rest belongs to the root.
    """

    parameters: int
    trainable: int
    units: tuple[int, ...]

    @property
    def root(self) -> int:
        """Number of parameters in no unit."""
        return self.parameters - sum(self.units)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank by its use, in bytes.

    Args:
        parameters: parameters that are kept between steps.
        gradients: reduced gradients.
        optimizer: optimizer states.
        gathered: gathered parameters and unreduced gradients of the units that are computed.
        activations: activations that are kept for the backward.
        communication: compressed copies of gradients, and the errors of the compression.
        is_offloaded: whether parameters, gradients and optimizer states are in host memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    communication: float
    is_offloaded: bool

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def device_bytes(self) -> float:
        """Bytes on the device, where it has memory of its own."""
        working = self.gathered + self.activations
        return working if self.is_offloaded else working + self.states + self.communication

    @property
    def host_bytes(self) -> float:
        """Bytes in host memory, where the device has memory of its own."""
        return self.states + self.communication if self.is_offloaded else 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes on device and host: the need of a rank on a CPU, where the two are one."""
        return self.device_bytes + self.host_bytes


def rank_memory(
    strategy: str,
    counts: ModelCounts,
    nodes: Sequence[int],
    *,
    state_bytes: StateBytes | None = None,
    activation_bytes: float = 0.0,
    communication_dtype: str = "fp32",
    accumulates: bool = False,
) -> list[RankMemory]:
    """Memory of a rank of each node: one entry a node.

    Args:
        strategy: one of `documents.strategy.STRATEGIES`.
        counts: numbers of the model's parameters.
        nodes: ranks on each node.
        state_bytes: bytes of a parameter in each role. None: fp32.
        activation_bytes: bytes of one micro-batch's activations.
        communication_dtype: format of gradients between nodes.
        accumulates: whether a step has several micro-batches; world-sharded strategies keep whole gradients between
            them.

    Raises:
        ValueError: there is no such strategy or format.
    """
    traits, each = strategy_traits(strategy), state_bytes or StateBytes()
    if communication_dtype not in WIRE_FORMATS:
        raise ValueError(f"found format {communication_dtype!r}, expected one of {', '.join(WIRE_FORMATS)}")
    memory = []
    for share, ranks in zip(group_sizes(traits, nodes), nodes, strict=True):
        gradients = counts.trainable * each.gradient / share
        if traits.shared_by is SharedBy.WORLD:
            communication = 0.0  # compressed and summed unit by unit
        else:
            # Each shard, and each bucket that a node has summed, is compressed by one rank of the node.
            compressed = counts.trainable * each.gradient / ranks
            communication = compressed * WIRE_FORMATS[communication_dtype].kept_share * (len(nodes) > 1)
        if traits.shared_by is SharedBy.NOBODY:
            gathered = 0.0 if each.gathered == each.parameter else counts.parameters * each.gathered  # autocast's copy
            if traits.is_plain:
                communication += gradients  # DDP's buckets beside .grad
        elif traits.gathered is Gathered.EACH_PASS:
            # The two largest units may be neighbours: an upper bound that needs no order.
            largest = sorted(counts.units, reverse=True)
            unreduced = counts.trainable if accumulates and traits.shared_by is SharedBy.WORLD else sum(largest[:1])
            gathered = (counts.root + sum(largest[:2])) * each.gathered + (unreduced + counts.root) * each.unreduced
        else:
            # Kept from the forward on: all parameters stay until the backward has used them.
            unreduced = counts.trainable if accumulates else max(counts.units, default=0) + counts.root
            gathered = counts.parameters * each.gathered + unreduced * each.unreduced
        memory.append(
            RankMemory(
                parameters=counts.parameters * each.parameter / share,
                gradients=gradients,
                optimizer=counts.trainable * each.optimizer / share,
                gathered=gathered,
                activations=activation_bytes,
                communication=communication,
                is_offloaded=traits.is_offloaded,
            )
        )
    return memory
