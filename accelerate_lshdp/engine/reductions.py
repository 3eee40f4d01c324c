# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""From ``communication`` of the plan to how gradients travel between nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_lshdp.engine.collectives import Bf16Reduction, ExactReduction, GradientReduction
from accelerate_lshdp.engine.int8_reduction import Int8Reduction, int8_bytes
from accelerate_lshdp.engine.powersgd_reduction import PowerSGDReduction, powersgd_bytes
from accelerate_lshdp.plan_sections import Communication


#: ``communication.dtype`` -> its reduction.
REDUCTIONS: dict[str, type[GradientReduction]] = {
    "fp32": ExactReduction,
    "bf16": Bf16Reduction,
    "int8": Int8Reduction,
    "powersgd": PowerSGDReduction,
}


def make_reduction(communication: Communication, group: dist.ProcessGroup) -> GradientReduction:
    """What sums gradients over a group (collective over its ranks)."""
    if communication.dtype == "powersgd":
        return PowerSGDReduction(group, communication.powersgd_rank, communication.powersgd_warmup_steps)
    return REDUCTIONS[communication.dtype](group)


def wire_bytes(communication: Communication, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> int:
    """Bytes of the all-reduce that sends as much as is sent for a buffer: 2 (N - 1) / N times these on N ranks.

    Args:
        communication: how it travels; of ``powersgd``, after its exact steps.
        buffer: of gradients.
        shapes: of the tensors in it.
    """
    if communication.dtype == "int8":
        return int8_bytes(buffer.numel())
    if communication.dtype == "powersgd":
        return powersgd_bytes(buffer.numel(), shapes, communication.powersgd_rank)
    width = torch.bfloat16.itemsize if communication.dtype == "bf16" else buffer.element_size()
    return buffer.numel() * width
