# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The values that a prediction of one training step consists of: seconds of each rank, bytes of each node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankStep:
    """Seconds of one rank's activities in a step.

    Args:
        compute_seconds: forward and backward.
        optimizer_seconds: the optimizer step.
        communication_seconds: exchanges inside the node, conversions of gradients, and the delay of computing by
            transfers that use its processor.
        wait_seconds: the rest of the step.
    """

    compute_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A predicted training step.

    Args:
        seconds: seconds of the whole step.
        ranks: the seconds of each rank.
        bytes_between_nodes: bytes that each node sends to other nodes.
        bytes_inside_nodes: bytes that each node's ranks send to each other, without shared memory.
    """

    seconds: float
    ranks: tuple[RankStep, ...]
    bytes_between_nodes: tuple[float, ...]
    bytes_inside_nodes: tuple[float, ...]
