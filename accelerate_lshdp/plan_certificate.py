# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks that a plan file is what its certificate proves to be the best. Needs no torch."""

from __future__ import annotations

from accelerate_lshdp.plan import Plan
from accelerate_lshdp.planning import CertificateError, verify_certificate
from accelerate_lshdp.profiling.documents import PROFILE_KIND, Profile, read_profiles


def verify_plan(plan: Plan) -> None:
    """Checks that a plan's batch, profile and certificate belong together, and that the certificate holds.

    Batch: the certificate's micro-batches, rank by rank. Profile: the certificate's curves and limits, in either
    format of the section; of a whole profile also the strategy, and the seconds on the network that it was planned
    with. What the plan predicts is not checked.

    Raises:
        CertificateError: a section is missing or malformed, they do not belong together, or the certificate does not
            prove that no plan of its kind is better.
    """
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
        _check_network(plan, profile)


def _check_network(plan: Plan, profile: Profile) -> None:
    """Checks what the certificate takes from a whole profile beyond the ranks."""
    if plan.strategy != profile.strategy:
        raise CertificateError(
            f'found strategy "{plan.strategy}", expected "{profile.strategy}", that of the profile: the plan was'
            " changed after it was made"
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
