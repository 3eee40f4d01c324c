# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Verification of a plan with a placement: its units lie where the certificate proves it best for its profile.

What was to choose is posed anew from the profile, the limits and the batch sizes that the plan carries. The
certificate then says how long a step takes, what it needs of each memory, and a bound that no placement undercuts with
these batch sizes.
"""

from __future__ import annotations

import math

from accelerate_lshdp.documents.placement import UnitPlacement
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.documents.profile import PROFILE_KIND, Profile
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.documents.unit_sizes import ModelUnits
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.from_profile import profiled_cluster, profiled_model
from accelerate_lshdp.planning.placement.options import pose_placement
from accelerate_lshdp.planning.placement.problem import PlacementProblem
from accelerate_lshdp.planning.placement.totals import trainable_choices
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts
from accelerate_lshdp.planning.proofs.certificate_fields import CertificateError
from accelerate_lshdp.planning.proofs.placement import verify_placement


def verify_placed_plan(plan: Plan) -> None:
    """Checks that batch, placement, profile, prediction and certificate belong together, and that the proof holds.

    Raises:
        CertificateError: a section is missing or was changed, or the certificate claims something that is not so.
    """
    for name in ("batch", "profile", "placement"):
        if getattr(plan, name) is None:
            raise CertificateError(
                f"found a plan without {name}, expected batch, profile and placement: its certificate is about them."
                " Make a plan with `accelerate-lshdp plan --placement auto`"
            )
    if plan.profile.get("kind") != PROFILE_KIND:
        raise CertificateError("found the short form of a profile, expected a whole one: placements need its units")
    try:
        profile = Profile.from_dict(plan.profile)
        problem = _problem(plan, profile)
    except (ValueError, PlanningError) as error:
        raise CertificateError(f"the plan's profile: {error}") from error
    if plan.strategy is not Strategy.OSDP:
        raise CertificateError(f'found strategy "{plan.strategy}", expected "{Strategy.OSDP}": the plan was changed')
    if plan.cluster is not None and plan.cluster.node_sizes != profile.cluster.node_sizes:
        raise CertificateError(
            f"found nodes of {list(plan.cluster.node_sizes)} ranks, expected {list(profile.cluster.node_sizes)}, those"
            " of the profile: the plan was changed after it was made"
        )
    verify_placement(problem, plan.certificate)
    _check_units(plan, profile.units, problem)
    _check_predicted(plan, problem)


def _problem(plan: Plan, profile: Profile) -> PlacementProblem:
    """What there was to choose: of what the planner may have chosen among, that which the certificate names."""
    model, cluster = profiled_model(profile), profiled_cluster(profile, plan.placement.memory_limit_bytes)
    steps = {count for _, count in plan.micro_batches}
    if len(plan.micro_batches) != cluster.world or len(steps) != 1:
        raise PlanningError(
            f"found the micro-batches {plan.micro_batches}, expected {cluster.world}, one a rank, and the same number"
            " of steps on all"
        )
    problems = []
    for choice in trainable_choices(model, cluster):
        costs = UnitCosts(model, cluster, choice.stores, choice.checkpoint, choice.slices)
        sizes = [size for size, _ in plan.micro_batches]
        problems.append(pose_placement(model, cluster, sizes, plan.micro_batches[0][1], costs=costs))
    named = [problem for problem in problems if problem.sha256() == plan.certificate.get("problem_sha256")]
    return (named or problems)[0]


def _check_units(plan: Plan, units: ModelUnits, problem: PlacementProblem) -> None:
    """Checks that as many units of each kind have each placement as the certificate counts."""
    placement = plan.placement
    modules = {unit.name: unit.modules for unit in (*units.units, units.root)}
    unknown = sorted({name for name, _ in placement.units} - {name for own in modules.values() for name in own})
    if unknown:
        raise CertificateError(f"found the unit {unknown[0]!r} in the placement, expected those of the profile")
    for kind, counts in zip(problem.kinds, plan.certificate["counts"], strict=True):
        found: dict[UnitPlacement, int] = {}
        for name in kind.units:
            chosen = {placement.of(module) for module in modules[name]}
            if len(chosen) > 1:
                raise CertificateError(f"found several placements for {modules[name]}, which share a parameter")
            found[next(iter(chosen))] = found.get(next(iter(chosen)), 0) + 1
        expected = {option.placement: count for option, count in zip(kind.options, counts, strict=True) if count}
        if found != expected:
            raise CertificateError(
                f"found the placements {_text(found)} of the units like {kind.units[0]!r}, expected {_text(expected)}"
                " by the certificate: the plan was changed after it was made"
            )


def _text(counts: dict[UnitPlacement, int]) -> str:
    return ", ".join(f"{count} x {placement}" for placement, count in counts.items())


def _check_predicted(plan: Plan, problem: PlacementProblem) -> None:
    """Checks the figures of the section `predicted`, which restate the certificate."""
    certificate, predicted = plan.certificate, plan.predicted or {}
    seconds = certificate["step_nanoseconds"] / 1e9
    needed = problem.by_rank(certificate["memory_bytes"])
    ranks = range(plan.world_size)
    gap = 1 - certificate["bound_nanoseconds"] / certificate["step_nanoseconds"]
    expected = {
        "step_seconds": seconds,
        "samples_per_second": plan.total_batch_size / seconds,
        "memory_bytes": [needed[rank][0] for rank in ranks],
        "memory_limit_bytes": [needed[rank][1] for rank in ranks],
        "gap": gap,
    }
    for name, value in predicted.items():
        if name not in expected:
            raise CertificateError(f"found predicted {name}, expected nothing but {', '.join(expected)}")
        right = expected[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        close = is_number and isinstance(right, float) and math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-12)
        if not close and value != right:
            raise CertificateError(
                f"found predicted {name} {value!r:.200}, expected {right!r:.200} by the certificate: the plan was"
                " changed after it was made"
            )
