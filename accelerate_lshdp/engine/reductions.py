# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""From ``communication`` of the plan to how gradients travel between nodes."""

from __future__ import annotations

import torch.distributed as dist

from accelerate_lshdp.engine.collectives import Bf16Reduction, ExactReduction, GradientReduction
from accelerate_lshdp.engine.int8_reduction import Int8Reduction
from accelerate_lshdp.engine.powersgd_reduction import PowerSGDReduction
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
