# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Verification of a certificate: checks that batch sizes are optimal, sharing no code with the planner.

A certificate states the problem (kind, total, options, a fingerprint of the profiles), the chosen micro-batches, their
step time T, and a bound on everything that was not chosen. That the choice keeps the limits and takes T is checked by
evaluating it. The bound depends on the kind.

Fixed total B: for each rank i, the largest micro-batch M_i(k) that it finishes in less than T if it has k of them, for
k = 1, 2, ... That none is larger is checked at M_i(k) + 1 samples, and at the k where a group's lists end. So a group
can do only k * s samples in less than T, s between its number of ranks and the sum of its M_i(k). No faster choice
exists if some group can do nothing, if the groups' greatest numbers add up to less than B, or if B is no sum of such
numbers: the sums are enumerated here.

Maximum throughput: see `throughput`.

Curves are evaluated in exact arithmetic, from their measured points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.planning.proofs.certificate_fields import CertificateError, Claim, read_claim, read_lists
from accelerate_lshdp.planning.proofs.digest import profiles_sha256
from accelerate_lshdp.planning.proofs.exact_times import ExactRank
from accelerate_lshdp.planning.proofs.throughput import check_throughput


__all__ = ["CertificateError", "verify_certificate"]

# The planner works in float64, whose sums and interpolations are off by a few units in the last place.
_ROUNDING = Fraction(1, 10**12)


def verify_certificate(profiles: Sequence[RankProfile], certificate: Mapping[str, Any]) -> None:
    """Checks that the certificate's choice is optimal, to a few parts in 10^12.

    No other cut of the total has a shorter step, or (maximum throughput) no other batch sizes make more samples a
    second.

    Args:
        profiles: one for each rank: the curves and limits that the certificate is about.
        certificate: as in `BatchSizes.certificate`, or read back from a plan file.

    Raises:
        CertificateError: it is malformed, is about other profiles, breaks a limit, or its bound does not hold.
    """
    # Cheap tests first: a certificate of other profiles would fail below with a message about a single rank.
    claim = read_claim(certificate, len(profiles))
    found = profiles_sha256(profiles)
    if claim.profiles_sha256 != found:
        raise CertificateError(
            f"found a certificate for profiles with the SHA-256 {claim.profiles_sha256:.64}, expected {found}: it is"
            " about other curves, limits or ranks"
        )
    ranks = _exact_ranks(profiles, claim)
    seconds = _check_choice(ranks, claim)
    if claim.kind == "max_throughput":
        check_throughput(ranks, claim, seconds, certificate, _ROUNDING)
        return
    _check_step(seconds, claim)
    below = read_lists(certificate, "largest_micro_batches_below", len(ranks))
    _check_lists(ranks, claim, below)
    _check_bound(claim, below)


def _exact_ranks(profiles: Sequence[RankProfile], claim: Claim) -> list[ExactRank]:
    """The exact step times of all ranks; ranks with the same profile object share one."""
    known: dict[int, ExactRank] = {}
    for rank, profile in enumerate(profiles):
        if id(profile) not in known:
            try:
                known[id(profile)] = ExactRank(profile, claim.bucket_seconds)
            except ValueError as error:
                raise CertificateError(f"rank {rank}: {error}, expected what the certificate needs") from error
    return [known[id(profile)] for profile in profiles]


def _check_choice(ranks: Sequence[ExactRank], claim: Claim) -> Fraction:
    """Checks the micro-batches against all limits; returns the exact seconds of the slowest rank."""
    for rank, (exact, (size, steps)) in enumerate(zip(ranks, claim.micro_batches, strict=True)):
        if not 1 <= size <= exact.largest:
            raise CertificateError(
                f"rank {rank} has micro-batches of {size} samples, expected 1 to its maximum {exact.largest}"
            )
        if steps < 1 or (steps > 1 and not claim.allow_accumulation):
            expected = "at least 1" if claim.allow_accumulation else "1, as accumulation was not allowed"
            raise CertificateError(f"rank {rank} has {steps} micro-batches, expected {expected}")
    for group in claim.groups:
        counts = [claim.micro_batches[rank][1] for rank in group]
        if len(set(counts)) > 1:
            raise CertificateError(
                f"the ranks {group} of one shard group have {counts} micro-batches, expected equal numbers"
            )
    total = sum(size * steps for size, steps in claim.micro_batches)
    if total != claim.total:
        raise CertificateError(f"the batch sizes sum to {total}, expected total_batch_size {claim.total}")
    return max(
        Fraction(exact.finish(size, steps), exact.units_per_second)
        for exact, (size, steps) in zip(ranks, claim.micro_batches, strict=True)
    )


def _check_step(seconds: Fraction, claim: Claim) -> None:
    """Checks that the choice takes the claimed step time."""
    if abs(seconds - Fraction(claim.step_seconds)) > _ROUNDING * seconds:
        raise CertificateError(
            f"the slowest rank takes {float(seconds)} s, expected the claimed step_seconds {claim.step_seconds}"
        )


def _check_lists(ranks: Sequence[ExactRank], claim: Claim, below: list[list[int]]) -> None:
    """Checks that no rank finishes larger or more micro-batches than its list says in less than the step time."""
    # Below the claimed time by the planner's rounding: cuts that are equal to the choice but for that are no better.
    bound = Fraction(claim.step_seconds) * (1 - _ROUNDING)
    for group in claim.groups:
        limits = {rank: ranks[rank].units_before(bound) for rank in group}
        lengths = {len(below[rank]) for rank in group}
        if len(lengths) > 1:
            raise CertificateError(
                f"the bounds of ranks {group}, one shard group, have the lengths {sorted(lengths)}, expected one"
            )
        for rank in group:
            for steps, size in enumerate(below[rank], 1):
                if not 1 <= size <= ranks[rank].largest:
                    raise CertificateError(
                        f"rank {rank} claims {steps} x {size} samples in less than step_seconds, expected"
                        f" micro-batches of 1 to its maximum {ranks[rank].largest}"
                    )
                # Finish times never fall with the size, so one sample more stands for all larger micro-batches.
                if size < ranks[rank].largest and ranks[rank].finish(size + 1, steps) < limits[rank]:
                    raise CertificateError(
                        f"rank {rank} finishes {steps} x {size + 1} samples in less than step_seconds, expected no"
                        f" more than {steps} x {size}: the bound does not hold"
                    )
        # More micro-batches than this leave less than one sample for each other rank. Finish times never fall with the
        # number either, so the first number beyond the lists stands for all larger ones.
        most = (claim.total - len(ranks) + len(group)) // len(group) if claim.allow_accumulation else 1
        steps = lengths.pop() + 1
        if steps <= most and all(ranks[rank].finish(1, steps) < limits[rank] for rank in group):
            raise CertificateError(
                f"ranks {group} finish {steps} micro-batches of one sample in less than step_seconds, expected a bound"
                " for them: the bound does not hold"
            )


def _check_bound(claim: Claim, below: list[list[int]]) -> None:
    """Checks that the groups cannot finish exactly the total in less than the step time."""
    choices = []  # of each group: number of micro-batches, least and greatest sum of their sizes
    for group in claim.groups:
        sums = map(sum, zip(*(below[rank] for rank in group), strict=True))
        choices.append([(steps, len(group), greatest) for steps, greatest in enumerate(sums, 1)])
    if not all(choices):
        return  # some group can finish nothing in less than the step time
    greatest = [max(steps * most for steps, _, most in own) for own in choices]
    spare = sum(greatest) - claim.total
    if spare < 0:
        return  # the groups' greatest numbers do not add up to the total
    # Bit d of an integer says whether the groups so far can do d samples less than their greatest numbers.
    reached, mask = 1, (1 << (spare + 1)) - 1
    for own, top in zip(choices, greatest, strict=True):
        missing = {
            top - steps * number
            for steps, least, most in own
            for number in range(max(least, -((spare - top) // steps)), most + 1)
        }
        sums = 0
        for number in missing:
            sums |= reached << number
        reached = sums & mask
    if reached >> spare & 1:
        raise CertificateError(
            f"in less than step_seconds the ranks can finish up to {sum(greatest)} samples, and {claim.total} too: a"
            " faster cut is not excluded"
        )
