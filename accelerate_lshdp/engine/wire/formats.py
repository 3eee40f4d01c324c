# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Makes the reduction that ``communication`` of the plan asks for, with the groups that it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire.int8 import Int8Reduction, int8_bytes
from accelerate_lshdp.engine.wire.powersgd import PowerSGDReduction, powersgd_bytes
from accelerate_lshdp.engine.wire.reduction import Bf16Reduction, ExactReduction, GradientReduction
from accelerate_lshdp.engine.wire.two_messages import TwoMessageReduction
from accelerate_lshdp.runtime.groups import new_group


#: ``communication.dtype`` -> its reduction.
REDUCTIONS: dict[str, type[GradientReduction]] = {
    "fp32": ExactReduction,
    "bf16": Bf16Reduction,
    "int8": Int8Reduction,
    "powersgd": PowerSGDReduction,
}


def make_second_group(communication: Communication, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The group for second messages, another of the same ranks (collective over the world).

    All ranks make it, members or not: torch numbers the groups that all ranks make. It names those that only their
    members make after how many groups a rank knows, which differs between ranks of unequal nodes.

    Args:
        communication: how gradients travel.
        partition: disjoint groups of ranks.

    Returns:
        That of this rank; None if it is in no group, or if the format sends one message.
    """
    if not issubclass(REDUCTIONS[communication.dtype], TwoMessageReduction):
        return None
    # A group of its own: second messages are sent by another thread, when each rank gets to it, and gloo would take
    # them for the first messages that the backward sends at that moment.
    made = {tuple(ranks): new_group(ranks) for ranks in partition}
    return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)


def make_reduction(
    communication: Communication, group: dist.ProcessGroup, second_group: dist.ProcessGroup | None = None
) -> GradientReduction:
    """Makes what sums gradients over a group (collective over its ranks).

    Args:
        communication: how they travel.
        group: the ranks that sum.
        second_group: from `make_second_group`.
    """
    if communication.dtype == "powersgd":
        options = communication.powersgd_rank, communication.powersgd_warmup_steps
        return PowerSGDReduction(group, second_group, *options)
    reduction = REDUCTIONS[communication.dtype]
    return reduction(group) if second_group is None else reduction(group, second_group)


def wire_bytes(communication: Communication, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> int:
    """The size in bytes of a buffer as it travels: each of N ranks sends 2 (N - 1) / N times as much.

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
