# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks that batch sizes are optimal without trusting, or sharing code with, the planner that made them.

A certificate names a cut b of the global batch B, its step time T and, for each rank, the largest batch c_i that the
rank finishes in less than T (0 if none). That T is optimal follows from three facts, each checked on its own: b is a
cut within the limits and its slowest rank takes T; rank i takes at least T for c_i + 1 samples, or may not have that
many; and sum(c_i) < B, or some c_i is 0. For a faster cut would give each rank at least one and at most c_i samples.
The curves are evaluated here in exact rational arithmetic, from their measured points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from accelerate_lshdp.planning.curves import RankProfile


# The planner works in float64, whose interpolation is off by a few units in the last place.
_ROUNDING = Fraction(1, 10**12)
_KEYS = {"total_batch_size", "batch_sizes", "step_seconds", "largest_batches_below"}


class CertificateError(ValueError):
    """A certificate that does not prove what it claims."""


def verify_certificate(profiles: Sequence[RankProfile], certificate: Mapping[str, Any]) -> None:
    """Checks that the certificate's batch sizes minimise the slowest rank's time, to a relative 1e-12.

    Args:
        profiles: one for each rank: the curves and limits that the certificate is about.
        certificate: as in `BatchSizes.certificate`, or read back from a plan file.

    Raises:
        CertificateError: it is malformed, its batch sizes break a limit, or its bound does not hold.
    """
    total, sizes, step, below = _read(certificate, len(profiles))
    if sum(sizes) != total:
        raise CertificateError(f"the batch sizes {sizes} sum to {sum(sizes)}, expected total_batch_size {total}")
    seconds = []
    for rank, (profile, size) in enumerate(zip(profiles, sizes, strict=True)):
        if not 1 <= size <= profile.max_micro_batch_size:
            raise CertificateError(
                f"rank {rank} has batch size {size}, expected 1 to its maximum {profile.max_micro_batch_size}"
            )
        seconds.append(_exact_seconds(profile, size))
    if abs(max(seconds) - step) > _ROUNDING * step:
        raise CertificateError(
            f"the slowest rank takes {float(max(seconds))} s, expected the claimed step_seconds {float(step)}"
        )
    for rank, (profile, count) in enumerate(zip(profiles, below, strict=True)):
        if not 0 <= count <= profile.max_micro_batch_size:
            raise CertificateError(
                f"rank {rank} claims {count} samples in less than step_seconds, expected 0 to its maximum"
                f" {profile.max_micro_batch_size}"
            )
        if count < profile.max_micro_batch_size and _exact_seconds(profile, count + 1) < step * (1 - _ROUNDING):
            raise CertificateError(
                f"rank {rank} finishes {count + 1} samples in less than step_seconds, expected no more than"
                f" {count}: the bound does not hold"
            )
    if sum(below) >= total and 0 not in below:
        raise CertificateError(
            f"in less than step_seconds the ranks finish {below} samples, {sum(below)} in all, expected less than the"
            f" total {total}: a faster cut is not excluded"
        )


def _exact_seconds(profile: RankProfile, batch_size: int) -> Fraction:
    """The running maximum of the linear interpolation at `batch_size`; constant below the first measured size."""
    points = list(zip(profile.time.batch_sizes, map(Fraction, profile.time.seconds), strict=True))
    best = points[0][1]
    for (left, start), (right, end) in zip(points, points[1:], strict=False):
        if batch_size <= left:
            break
        # A segment's maximum over [left, x] is at one of the two ends.
        reached = min(right, batch_size)
        best = max(best, start, start + (end - start) * Fraction(reached - left, right - left))
    return best


def _read(certificate: Mapping[str, Any], ranks: int) -> tuple[int, list[int], Fraction, list[int]]:
    if not isinstance(certificate, Mapping) or set(certificate) != _KEYS:
        raise CertificateError(f"found {certificate!r:.200}, expected an object with the keys {sorted(_KEYS)}")
    total, step = certificate["total_batch_size"], certificate["step_seconds"]
    if not _is_integer(total):
        raise CertificateError(f"found total_batch_size {total!r:.60}, expected an integer")
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 < step < math.inf:
        raise CertificateError(f"found step_seconds {step!r:.60}, expected a positive and finite number")
    lists = []
    for key in ("batch_sizes", "largest_batches_below"):
        entries = certificate[key]
        if not isinstance(entries, list) or len(entries) != ranks or not all(map(_is_integer, entries)):
            raise CertificateError(f"found {key} {entries!r:.200}, expected a list of {ranks} integers, one a rank")
        lists.append(entries)
    return total, lists[0], Fraction(step), lists[1]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
