# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a strategy needs of memory, by the accounting of ZeRO (Rajbhandari et al., 2020, section 3).

With P parameters and Adam, a rank that holds everything keeps P * (parameter + gradient + optimizer) bytes: 16 * P, in
fp32 as 4 + 4 + 8, in ZeRO's mixed precision as 2 + 2 + 12. Where n ranks share one copy each keeps 1/n of that, and
beside it what is gathered: two units and the root (one unit is computed, the next one gathered), and the gradient of
one unit before it is reduced. Activations come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.strategy import SharedBy, group_sizes, strategy_traits


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that each parameter has in every role.

    Args:
        parameter: as it is kept between steps.
        gradient: reduced, as the optimizer reads it.
        optimizer: Adam's two moments; with a master copy of the parameter where `parameter` is none.
        gathered: as it is computed with.
        unreduced: its gradient as the backward leaves it.
    """

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 8
    gathered: float = 4
    unreduced: float = 4


#: By `mixed_precision` of accelerate: what the engine keeps.
STATE_BYTES = {
    "no": StateBytes(),
    "bf16": StateBytes(gathered=2, unreduced=2),
    "fp16": StateBytes(gathered=2, unreduced=2),
}
#: ZeRO's: parameters and gradients in fp16; the optimizer keeps the fp32 master copy.
ZERO_BYTES = StateBytes(parameter=2, gradient=2, optimizer=12, gathered=2, unreduced=2)


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Numbers of parameters.

    Args:
        parameters: all of them, tied ones once.
        trainable: those with gradients and optimizer states.
        units: of each unit, in the order of the forward; the rest belongs to the root.
    """

    parameters: int
    trainable: int
    units: tuple[int, ...]

    @property
    def root(self) -> int:
        """Parameters in no unit."""
        return self.parameters - sum(self.units)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank needs, in bytes.

    Args:
        parameters: what it keeps between steps.
        gradients: reduced ones.
        optimizer: optimizer states.
        gathered: parameters and unreduced gradients of the units at work.
        activations: kept for the backward.
        communication: compressed copies and errors that compression left.
        is_offloaded: parameters, gradients and optimizer states are in host memory.
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
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def device_bytes(self) -> float:
        """On the device, where it has memory of its own."""
        working = self.gathered + self.activations
        return working if self.is_offloaded else working + self.states + self.communication

    @property
    def host_bytes(self) -> float:
        """In host memory, where the device has memory of its own."""
        return self.states + self.communication if self.is_offloaded else 0.0

    @property
    def total_bytes(self) -> float:
        """Of both: what it needs on a CPU, where the host's memory is the device's."""
        return self.device_bytes + self.host_bytes


#: What a format keeps for each byte of a rank's fp32 gradient: copies under way, and errors to be made up for.
_FORMAT_SHARES = {"fp32": 0.0, "bf16": 0.5, "int8": 1.5, "powersgd": 1.0}


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
    """What a rank of each node needs.

    Args:
        strategy: one of `planning.strategies.STRATEGIES`.
        counts: of the model.
        nodes: ranks on each node.
        state_bytes: of a parameter. None: fp32.
        activation_bytes: of one micro-batch.
        communication_dtype: of gradients between nodes.
        accumulates: several micro-batches a step: world-sharded strategies keep whole gradients in between.

    Raises:
        ValueError: there is no such strategy or format.
    """
    traits, each = strategy_traits(strategy), state_bytes or StateBytes()
    if communication_dtype not in _FORMAT_SHARES:
        raise ValueError(f"found format {communication_dtype!r}, expected one of {', '.join(_FORMAT_SHARES)}")
    memory = []
    for share in group_sizes(traits, nodes):
        gradients = counts.trainable * each.gradient / share
        if traits.shared_by is SharedBy.WORLD:
            communication = 0.0  # compressed and summed unit by unit
        else:
            communication = gradients * _FORMAT_SHARES[communication_dtype] * (len(nodes) > 1)
        if traits.shared_by is SharedBy.NOBODY:
            gathered = 0.0 if each.gathered == each.parameter else counts.parameters * each.gathered  # autocast's copy
            if traits.is_plain:
                communication += gradients  # DDP's buckets beside .grad
        elif traits.gathers_twice:
            largest = sorted(counts.units, reverse=True)
            unreduced = counts.trainable if accumulates and traits.shared_by is SharedBy.WORLD else sum(largest[:1])
            gathered = (counts.root + sum(largest[:2])) * each.gathered + (unreduced + counts.root) * each.unreduced
        else:
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
