# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The cluster and the model of a prediction: rates, costs and sizes, as immutable values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.planning.cost.step_simulation import SimulatedStep, simulate_step


#: Number of equal units that stand for a model whose units are not given.
_UNITS = 8
_COST_FIELDS = (
    "seconds_per_byte",
    "seconds_per_collective",
    "conversion_seconds_per_byte",
    "copy_seconds_per_byte",
    "seconds_per_unit",
    "inside_seconds_per_byte",
)


@dataclass(frozen=True, slots=True)
class CommunicationCost:
    """Processor time that communication takes of a node, in seconds of a node that does nothing else meanwhile.

    Args:
        seconds_per_byte: for each byte that its ranks send: sending it, receiving another one, adding or copying it.
        seconds_per_collective: for each reduction or gather, whatever its size, and each rank that takes part; a lossy
            format has its own.
        conversion_seconds_per_byte: for each byte of a gradient that is compressed and decompressed.
        copy_seconds_per_byte: for each byte of a unit that a rank copies to or from the buffer in which it travels.
        seconds_per_unit: for each unit that a rank gathers or reduces, whatever its size.
        inside_seconds_per_byte: `seconds_per_byte` of gathering and reducing inside a node; 0: the same.

    Raises:
        ValueError: a value is negative or not finite.
    """

    seconds_per_byte: float = 0.0
    seconds_per_collective: float = 0.0
    conversion_seconds_per_byte: float = 0.0
    copy_seconds_per_byte: float = 0.0
    seconds_per_unit: float = 0.0
    inside_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in _COST_FIELDS:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"found {name} {value}, expected finite seconds of at least 0: measure again")

    @property
    def seconds_per_byte_inside(self) -> float:
        """Seconds per byte of gathering and reducing inside a node."""
        return self.inside_seconds_per_byte or self.seconds_per_byte

    def on(self, cores: float) -> CommunicationCost:
        """The cost on a node with `cores` cores (fractions allowed), from the cost in CPU seconds of one core."""
        return CommunicationCost(*(getattr(self, name) / cores for name in _COST_FIELDS))


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """The nodes of a cluster and the links between and inside them.

    Args:
        nodes: ranks on each node, in rank order.
        link: between nodes.
        communication_costs: what communication takes of each node's processors. Empty: nothing, as where devices
            compute.
        inside: the link between ranks of a node, where it is not the processors that move bytes inside the node. None:
            they do, at `communication_costs`.
        device_link: the link between host memory and each device, for offloaded parameters and gradients. None: the
            host computes.
        shared_memory: node-sharded strategies exchange through shared memory inside a node.
        two_stage: world-sharded strategies exchange inside nodes and between them in two stages.
        streams: devices gather and reduce while they compute.
        message_delay_seconds: seconds by which a message between nodes is delayed while the nodes compute, where it
            waits for a processor.
        simulate: as `simulate_step`; another one where nodes are not machines of their own.

    Raises:
        ValueError: there is no node, one has no rank, values do not match the nodes, or the delay is impossible.
    """

    nodes: tuple[int, ...]
    link: LinkCost
    communication_costs: tuple[CommunicationCost, ...] = ()
    inside: LinkCost | None = None
    device_link: LinkCost | None = None
    shared_memory: bool = False
    two_stage: bool = True
    streams: bool = False
    message_delay_seconds: float = 0.0
    simulate: Callable[..., SimulatedStep] = simulate_step

    def __post_init__(self) -> None:
        nodes = tuple(self.nodes)
        if not nodes or min(nodes) < 1:
            raise ValueError(f"found nodes with {list(nodes)} ranks, expected at least one node and one rank on each")
        if not 0 <= self.message_delay_seconds < math.inf:
            raise ValueError(
                f"found message_delay_seconds {self.message_delay_seconds}, expected finite seconds of at least 0:"
                " measure again"
            )
        costs = tuple(self.communication_costs) or (CommunicationCost(),) * len(nodes)
        if len(costs) != len(nodes):
            raise ValueError(
                f"found communication_costs of {len(costs)} nodes, expected one for each of {len(nodes)} nodes"
            )
        object.__setattr__(self, "communication_costs", costs)
        object.__setattr__(self, "nodes", nodes)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model's parameters and gradients as they travel.

    Args:
        parameter_bytes: bytes of all parameters, as they are gathered.
        gradient_bytes: bytes of all gradients before they are compressed.
        unit_bytes: bytes of each unit's parameters, in the order of the forward. The rest belongs to the root, whose
            gradients come last. Empty: equal units without a root.
        ready_bytes: bytes of the gradient buckets whose times are `bucket_ready` in the profiles, in their order.
            Empty: gradients become ready evenly during the backward.

    Raises:
        ValueError: the model has no bytes, or units have more than it.
    """

    parameter_bytes: float
    gradient_bytes: float
    unit_bytes: tuple[float, ...] = ()
    ready_bytes: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not (0 < self.parameter_bytes < math.inf and 0 <= self.gradient_bytes < math.inf):
            raise ValueError(
                f"found a model of {self.parameter_bytes} bytes with gradients of {self.gradient_bytes}, expected"
                " positive numbers: give the bytes of its parameters and of its gradients"
            )
        units = tuple(self.unit_bytes) or (self.parameter_bytes / _UNITS,) * _UNITS
        # Sums of float sizes may exceed their total by rounding; a larger excess is a mistake.
        if sum(units) > self.parameter_bytes * (1 + 1e-9):
            raise ValueError(
                f"found units of {sum(units):.0f} bytes in a model of {self.parameter_bytes:.0f}: correct either"
            )
        object.__setattr__(self, "unit_bytes", units)
        object.__setattr__(self, "ready_bytes", tuple(self.ready_bytes))

    @property
    def root_bytes(self) -> float:
        """Bytes of parameters in no unit."""
        # What rounding leaves of the difference is not a root: it would add an exchange to every step.
        rest = self.parameter_bytes - sum(self.unit_bytes)
        return rest if rest > 1e-9 * self.parameter_bytes else 0.0
