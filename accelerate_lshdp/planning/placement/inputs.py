# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What placements are planned from: the sizes of a model's units, and a cluster with the limits of its ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.unit_sizes import MeasuredHead, MeasuredUnit, ModelUnits, SliceableWeights
from accelerate_lshdp.planning.cost.memory import STATE_BYTES, StateBytes
from accelerate_lshdp.planning.cuts.step_time import PlanningError


@dataclass(frozen=True, slots=True)
class UnitSize:
    """The sizes of one unit of a model.

    Args:
        name: of its module; the empty string for the root, what is in no unit.
        parameters: number of its parameters.
        trainable: number of those that have gradients and optimizer states.
        activation_bytes: bytes of one sample that it keeps for its backward.
        input_bytes: bytes of one sample that are kept instead if its activations are recomputed: those of its input.
        flops: operations of one sample's forward.
        sliceable: its weights that can be gathered in slices. None: it has none.
        largest_parameter: numbers in the largest parameter that is trained. 0: none is.

    Raises:
        PlanningError: a size is negative or not finite, or more is trainable than there is.
    """

    name: str
    parameters: int
    trainable: int
    activation_bytes: float
    input_bytes: float
    flops: float
    sliceable: SliceableWeights | None = None
    largest_parameter: int = 0

    @property
    def anonymous(self) -> UnitSize:
        """The same sizes without the name: equal for units that are alike."""
        return replace(self, name="any unit")

    @classmethod
    def of(cls, unit: MeasuredUnit) -> UnitSize:
        """The sizes of a measured unit."""
        return cls(
            unit.name,
            unit.parameters,
            unit.trainable,
            unit.activation_bytes,
            unit.input_bytes,
            unit.flops,
            unit.sliceable,
            unit.largest_parameter,
        )

    def __post_init__(self) -> None:
        for value in (self.parameters, self.trainable, self.activation_bytes, self.input_bytes, self.flops):
            if not 0 <= value < math.inf:
                raise PlanningError(
                    f'found a size of {value} of unit "{self.name}", expected a finite one of at least 0'
                )
        if self.trainable > self.parameters:
            raise PlanningError(
                f'found {self.trainable} trainable parameters of unit "{self.name}", expected at most its'
                f" {self.parameters}"
            )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model.

    Args:
        units: in the order of the forward.
        root: what is in no unit, such as embeddings and heads. It is gathered before the first unit and reduced after
            the last one.
        working_bytes: bytes of one sample that exist for a moment of a backward and are no unit's: the gradient of the
            largest activation, and the one that this is computed from.
        state_bytes: bytes of one parameter in each of its roles.
        head: what the end of the forward needs. None: it is not known; the memory of a rank is then that of one
            moment, at which everything is there at once.
    """

    units: tuple[UnitSize, ...]
    root: UnitSize
    working_bytes: float = 0.0
    state_bytes: StateBytes = field(default_factory=StateBytes)
    head: MeasuredHead | None = None

    @classmethod
    def of(cls, model: ModelUnits) -> ModelSizes:
        """The sizes of a measured model."""
        root, working = UnitSize.of(model.root), model.working_bytes
        if root.sliceable is not None and root.sliceable.loss_bytes is not None:
            # The root's own, as they depend on its placement.
            beside = root.sliceable.loss_bytes - root.sliceable.logits_bytes
            root, working = replace(root, activation_bytes=root.activation_bytes + beside), working - beside
        return cls(tuple(map(UnitSize.of, model.units)), root, working, _state_bytes(model), model.head)

    @property
    def working_of_logits(self) -> float:
        """By how much the working bytes of the logits are more than all others: among the root's activations."""
        weights = self.root.sliceable
        return 0.0 if weights is None or weights.loss_bytes is None else weights.loss_bytes - weights.logits_bytes

    @property
    def everything(self) -> tuple[UnitSize, ...]:
        """All units, and the root if it has anything."""
        return (*self.units, self.root) if self.root.parameters or self.root.activation_bytes else self.units

    @property
    def trainable(self) -> int:
        """Number of trainable parameters."""
        return sum(unit.trainable for unit in self.everything)

    @property
    def largest_parameter(self) -> int:
        """Numbers in the largest parameter that is trained."""
        return max((unit.largest_parameter for unit in self.everything), default=0)

    @property
    def flops(self) -> float:
        """Operations of one sample's forward."""
        return sum(unit.flops for unit in self.everything)


def _state_bytes(model: ModelUnits) -> StateBytes:
    """The engine's bytes of a parameter in each role, for models whose parameters are not in fp32, too."""
    each = STATE_BYTES[model.mixed_precision]
    ratio = model.parameter_bytes / each.parameter
    # Gradients and Adam's moments have the type of the parameter; autocast computes in its own.
    whole = model.mixed_precision == "no"
    return StateBytes(
        each.parameter * ratio,
        each.gradient * ratio,
        each.optimizer * ratio,
        each.gathered * (ratio if whole else 1),
        each.unreduced * (ratio if whole else 1),
    )


@dataclass(frozen=True, slots=True)
class PlacementCluster:
    """The ranks of a cluster, their links and their limits.

    Args:
        nodes: ranks on each node, in rank order.
        profiles: one for each rank: seconds of forward and backward without recomputing, the largest micro-batch, and
            as `fixed_seconds` the optimizer step of all parameters on its device.
        memory_limits: bytes that each rank may use, one a rank.
        link: between nodes; all ranks of a node share it.
        inside: of each device to the others of its node.
        device_link: between host memory and each device. None: the host computes, and "host" is not offered, as it is
            the same as "node".
        host_limits: bytes of host memory that parameters and states may use, one a node. None: any number.
        host_optimizer_seconds: of an optimizer step of all parameters on the host, one a node. Empty: 0.
        process_bytes: bytes that each rank needs beside parameters, states and activations.
        streams: devices send while they compute. Else only what travels between nodes once a step does (see
            `StrategyTraits.overlaps`), and all other exchanges stop the computing.
        counts_states_alone: of memory only parameters, gradients, states and gathered units are counted, as each rank
            had its own: neither what the ranks of a node map together nor what the optimizer's step needs.

    Raises:
        PlanningError: numbers do not match, or a limit is not positive.
    """

    nodes: tuple[int, ...]
    profiles: Sequence[RankProfile]
    memory_limits: tuple[int, ...]
    link: LinkCost
    inside: LinkCost
    device_link: LinkCost | None = None
    host_limits: tuple[int, ...] | None = None
    host_optimizer_seconds: tuple[float, ...] = ()
    process_bytes: int = 0
    streams: bool = True
    counts_states_alone: bool = False

    def __post_init__(self) -> None:
        if not self.nodes or min(self.nodes) < 1:
            raise PlanningError(f"found nodes with {list(self.nodes)} ranks, expected at least one rank on each")
        world = sum(self.nodes)
        if len(self.profiles) != world or len(self.memory_limits) != world:
            raise PlanningError(
                f"found {len(self.profiles)} profiles and {len(self.memory_limits)} memory limits, expected {world} of"
                " both, one a rank"
            )
        if min(self.memory_limits) < 1:
            raise PlanningError(
                f"found memory limits of {list(self.memory_limits)}, expected positive numbers of bytes"
            )
        for name in ("host_limits", "host_optimizer_seconds"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.nodes):
                raise PlanningError(f"found {name} of {len(getattr(self, name))} nodes, expected {len(self.nodes)}")

    @property
    def computes_on_hosts(self) -> bool:
        """Whether ranks compute in host memory, which those of a node map together."""
        return self.device_link is None and not self.streams and not self.counts_states_alone

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(self.nodes)

    @property
    def is_even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len(set(self.nodes)) == 1

    @property
    def node_sizes_of_ranks(self) -> list[int]:
        """The number of ranks on each rank's node."""
        return [size for size in self.nodes for _ in range(size)]
