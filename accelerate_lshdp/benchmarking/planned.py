# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is known of a cluster's ranks and network before training: planned batch sizes and predicted step times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_lshdp.benchmarking.cases import EQUAL, PLAN, Case, equal_sizes
from accelerate_lshdp.planning import plan_fixed_total
from accelerate_lshdp.planning.strategy_time import WIRE_SHARES, ModelSize
from accelerate_lshdp.profiling.documents import Profile
from accelerate_lshdp.profiling.measured import Network, read_network


@dataclass(frozen=True)
class Knowledge:
    """One profiling run, and each network as measured under the cluster's speeds.

    Args:
        profile: of the ranks.
        networks: by name.
        size: of the model.
    """

    profile: Profile
    networks: Mapping[str, Network]
    size: ModelSize

    @classmethod
    def from_documents(cls, profile: Any, networks: Mapping[str, Any], size: ModelSize) -> Knowledge:
        """From what the ranks told."""
        return cls(
            Profile.from_dict(profile), {name: read_network(network) for name, network in networks.items()}, size
        )


def micro_batches_of(
    case: Case, total: int, ranks: int, knowledge: Knowledge | None, network: str
) -> list[tuple[int, int]]:
    """(size, accumulation steps) of each rank.

    Raises:
        PlanningError: no plan is possible.
    """
    if case.batch_sizes == EQUAL:
        return [(size, 1) for size in equal_sizes(total, ranks)]
    if case.batch_sizes != PLAN:
        return [(size, 1) for size in case.batch_sizes]
    profiles = knowledge.profile.rank_profiles()
    share = WIRE_SHARES.get(case.communication_dtype, 0.0)
    all_reduce = knowledge.networks[network].all_reduce
    planned = plan_fixed_total(
        profiles,
        total,
        allow_accumulation=total > sum(profile.largest_micro_batch for profile in profiles),
        bucket_seconds=[all_reduce.seconds(int(size * share)) for size in knowledge.profile.bucket_bytes],
    )
    return [tuple(entry) for entry in planned.micro_batches]


def predicted_seconds(
    case: Case, micro_batches: list[tuple[int, int]], knowledge: Knowledge | None, network: str
) -> float | None:
    """The step that the cost model predicts; None without a profile."""
    return None
