# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Makes the reduction that ``communication`` of the plan asks for, with the groups that it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire import bf16, int8, powersgd  # noqa: F401 - imported to register their formats
from accelerate_lshdp.engine.wire.reduction import REDUCTIONS, GradientReduction
from accelerate_lshdp.runtime.groups import new_group


def make_second_group(
    communication: Communication, partition: Sequence[Sequence[int]], backend: str | None = None
) -> dist.ProcessGroup | None:
    """The group for second messages, another of the same ranks (collective over the world).

    All ranks make it, members or not: torch numbers the groups that all ranks make. It names those that only their
    members make after how many groups a rank knows, which differs between ranks of unequal nodes.

    Args:
        communication: how gradients travel.
        partition: disjoint groups of ranks.
        backend: None: that of the group of all ranks.

    Returns:
        That of this rank; None if it is in no group, or if the format sends one message.
    """
    if not REDUCTIONS[communication.dtype].takes_two_messages:
        return None
    # A group of its own: second messages are sent by another thread, when each rank gets to it, and gloo would take
    # them for the first messages that the backward sends at that moment.
    made = {tuple(ranks): new_group(ranks, backend) for ranks in partition}
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
    return REDUCTIONS[communication.dtype].make(communication, group, second_group)


def wire_bytes(communication: Communication, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> int:
    """The size in bytes of a buffer as it travels: each of N ranks sends 2 (N - 1) / N times as much.

    Args:
        communication: how it travels; of ``powersgd``, after its exact steps.
        buffer: of gradients.
        shapes: of the tensors in it.
    """
    return REDUCTIONS[communication.dtype].wire_bytes(communication, buffer, shapes)
