# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The batch sizes with which the cases of a comparison train. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerate_lshdp.comparing.cases import AUTO, EQUAL, PLAN, Case, equal_sizes
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.profile_sections import MessageTimes
from accelerate_lshdp.planning import plan_fixed_total


def micro_batches_of(
    case: Case, total: int, ranks: int, plan: Callable[[], list[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """(size, accumulation steps) of each rank.

    Args:
        case: says how they are chosen.
        total: samples in the global batch.
        ranks: number of ranks.
        plan: makes the planned ones; called only for a case that trains with them.
    """
    if case.batch_sizes in (EQUAL, AUTO):  # from an equal split the training goes on by itself
        return [(size, 1) for size in equal_sizes(total, ranks)]
    if case.batch_sizes == PLAN:
        return plan()
    return [(size, 1) for size in case.batch_sizes]


def plan_micro_batches(
    profile: Profile,
    total: int,
    all_reduce: MessageTimes | None,
    wire_share: float,
    shard_groups: Sequence[Sequence[int]] | None = None,
) -> list[tuple[int, int]]:
    """The best (micro-batch size, accumulation steps) of each rank, for a profile and a network.

    Args:
        profile: of the ranks.
        total: samples in the global batch.
        all_reduce: times of all-reduces on the network; None: there is none.
        wire_share: bytes on the wire / bytes of gradients in full precision.
        shard_groups: ranks that need equal numbers of micro-batches; None: each rank alone.

    Raises:
        PlanningError: no plan is possible.
    """
    profiles = profile.rank_profiles()
    planned = plan_fixed_total(
        profiles,
        total,
        allow_accumulation=total > sum(profile.largest_micro_batch for profile in profiles),
        bucket_seconds=None
        if all_reduce is None
        else [all_reduce.seconds(int(size * wire_share)) for size in profile.bucket_bytes],
        shard_groups=shard_groups,
    )
    return [tuple(entry) for entry in planned.micro_batches]
