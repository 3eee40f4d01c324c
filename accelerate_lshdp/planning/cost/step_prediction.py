# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The values that a prediction of one training step consists of: seconds of each rank, bytes of each node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank does in a step, in seconds.

    Args:
        compute_seconds: forward and backward.
        optimizer_seconds: its optimizer step.
        communication_seconds: what exchanges inside the node, conversions, and transfers that take its processor add.
        wait_seconds: the rest.
    """

    compute_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """What is predicted for a step.

    Args:
        seconds: of the whole step.
        ranks: what each of them does.
        bytes_between_nodes: what each node sends to other nodes.
        bytes_inside_nodes: what each node's ranks send to each other, shared memory aside.
    """

    seconds: float
    ranks: tuple[RankStep, ...]
    bytes_between_nodes: tuple[float, ...]
    bytes_inside_nodes: tuple[float, ...]
