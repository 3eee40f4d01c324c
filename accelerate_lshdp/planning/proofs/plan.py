# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Verification of a plan: its batch sizes are those that its certificate proves optimal for its profile. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.documents.profile import PROFILE_KIND, Profile, read_profiles
from accelerate_lshdp.planning import CertificateError, RankProfile, verify_certificate
from accelerate_lshdp.planning.proofs.placed_plan import verify_placed_plan


def verify_plan(plan: Plan) -> None:
    """Checks that a plan's batch, profile and certificate belong together, and that the certificate holds.

    Batch: the certificate's micro-batches, rank by rank. Profile: the certificate's curves and limits, in either
    format of the section; of a whole profile also nodes and strategy, the shard groups that follow from them, and the
    seconds on the network that it was planned with. Predicted: what follows from the profile for the batch, with or
    without what the network takes. A plan whose certificate is about a placement is checked by `verify_placed_plan`.

    Raises:
        CertificateError: a section is missing or malformed, they do not belong together, or the certificate does not
            prove that no plan of its kind is better.
    """
    if isinstance(plan.certificate, Mapping) and plan.certificate.get("kind") == "placement":
        verify_placed_plan(plan)
        return
    for name in ("batch", "profile", "certificate"):
        if getattr(plan, name) is None:
            raise CertificateError(
                f"found a plan without {name}, expected batch, profile and certificate: nothing can be verified. Make"
                " a plan with `accelerate-lshdp plan`"
            )
    profile = None
    try:
        if plan.profile.get("kind") == PROFILE_KIND:
            profile = Profile.from_dict(plan.profile)
        ranks = read_profiles(plan.profile)
    except ValueError as error:
        raise CertificateError(f"the plan's profile: {error}") from error
    if len(ranks) != plan.world_size:
        raise CertificateError(
            f"found profiles of {len(ranks)} ranks, expected {plan.world_size}, those of the plan's batch"
        )
    verify_certificate(ranks, plan.certificate)
    planned = [list(pair) for pair in plan.micro_batches]
    for rank, (found, expected) in enumerate(zip(planned, plan.certificate["micro_batches"], strict=True)):
        if found != expected:
            raise CertificateError(
                f"rank {rank} of the plan has (micro-batch size, steps) {found}, expected {expected}, those of the"
                " certificate: the plan was changed after it was made"
            )
    if profile is not None:
        _check_cluster(plan, profile)
    _check_predicted(plan, ranks, profile)


def _check_cluster(plan: Plan, profile: Profile) -> None:
    """Checks that nodes, strategy and network of plan and certificate are those of the profile."""
    if plan.cluster is not None and plan.cluster.node_sizes != profile.cluster.node_sizes:
        raise CertificateError(
            f"found nodes of {list(plan.cluster.node_sizes)} ranks, expected {list(profile.cluster.node_sizes)}, those"
            " of the profile: the plan was changed after it was made"
        )
    if plan.strategy != profile.strategy:
        raise CertificateError(
            f'found strategy "{plan.strategy}", expected "{profile.strategy}", that of the profile: the plan was'
            " changed after it was made"
        )
    if plan.certificate["allow_accumulation"]:
        # A certificate writes groups of single ranks as null.
        groups = plan.certificate["shard_groups"] or [[rank] for rank in range(plan.world_size)]
        expected_groups = profile.shard_groups()
        if sorted(map(sorted, groups)) != expected_groups:
            raise CertificateError(
                f"found shard_groups {groups!r:.200} in the certificate, expected {expected_groups!r:.200}, those of"
                " the profile's nodes and strategy"
            )
    buckets = plan.certificate["bucket_seconds"]
    if buckets is not None and buckets != profile.bucket_seconds():
        raise CertificateError(
            f"found bucket_seconds {buckets!r:.200} in the certificate, expected {profile.bucket_seconds()!r:.200},"
            " those of the profile, or null"
        )
    if plan.certificate["kind"] == "max_throughput":
        # What travels while the backward goes on takes no time after it.
        expected = 0.0 if buckets else profile.communication_seconds()
        if plan.certificate["communication_seconds"] != expected:
            raise CertificateError(
                f"found communication_seconds {plan.certificate['communication_seconds']} in the certificate, expected"
                f" {expected}, those of the profile"
            )


def _check_predicted(plan: Plan, ranks: Sequence[RankProfile], profile: Profile | None) -> None:
    """Checks every figure in the plan's section `predicted` against the profile."""
    # Either set is right: the planner's own step, or that step plus the seconds of communication after it.
    following = [_predictions(plan, ranks, 0.0)]
    if profile is not None:
        # The step of a maximum throughput has all of it already, and so has one whose gradients overlap.
        counted = plan.certificate["kind"] == "max_throughput" or plan.certificate["bucket_seconds"]
        following.append(_predictions(plan, ranks, 0.0 if counted else profile.communication_seconds()))
    wrong = [_first_difference(plan.predicted or {}, expected) for expected in following]
    if all(wrong):
        raise CertificateError(f"{wrong[-1]}: the plan was changed after it was made")


def _predictions(plan: Plan, ranks: Sequence[RankProfile], communication_seconds: float) -> dict[str, Any]:
    """The figures that follow from the profile for the plan's batch sizes.

    Args:
        plan: a plan with a valid certificate.
        ranks: the profiles of its ranks.
        communication_seconds: seconds to add to the step of the certificate.
    """
    compute, memory = [], []
    for rank, (size, steps) in zip(ranks, plan.micro_batches, strict=True):
        between = (steps - 1) * rank.accumulation_overhead_seconds
        compute.append(steps * rank.time(size) + between + rank.communication_load_seconds)
        memory.append(None if rank.memory is None else round(rank.memory(size)))
    return {
        "step_seconds": plan.certificate["step_seconds"] + communication_seconds,
        "compute_seconds": compute,
        "idle_fraction": 1 - sum(compute) / len(compute) / max(compute),
        "memory_bytes": memory,
    }


def _first_difference(predicted: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """A message about the first wrong figure of `predicted`; None if all are right. Figures may be missing."""
    for name, value in predicted.items():
        if name not in expected:
            return f"found predicted {name}, expected nothing but {', '.join(expected)}"
        if not _agree(value, expected[name]):
            return f"found predicted {name} {value!r:.200}, expected {expected[name]!r:.200} by the profile"
    return None


def _agree(found: Any, expected: Any) -> bool:
    """Whether two JSON values are equal, floats up to rounding (relative 1e-9)."""
    if isinstance(expected, list):
        same_length = isinstance(found, list) and len(found) == len(expected)
        return same_length and all(_agree(one, other) for one, other in zip(found, expected, strict=True))
    if isinstance(expected, float):
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        return is_number and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)
    # The types too: True must not pass for 1.
    return type(found) is type(expected) and found == expected
