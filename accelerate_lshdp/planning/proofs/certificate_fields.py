# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Strict reading of a certificate's fields: a value of the right kind, or a `CertificateError`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


# Longer than any step, and so short that sums and products of what is read can still be shown as floats.
_LONGEST_SECONDS = 1e100
KINDS = ("fixed_total", "max_throughput")
_COMMON = (
    "kind",
    "profiles_sha256",
    "allow_accumulation",
    "bucket_seconds",
    "shard_groups",
    "total_batch_size",
    "micro_batches",
    "step_seconds",
)
# Left out where every total was allowed.
_OPTIONAL = {"fixed_total": (), "max_throughput": ("multiple_of",)}
_OWN = {
    "fixed_total": ("largest_micro_batches_below",),
    "max_throughput": ("communication_seconds", "max_accumulation_steps", "check_seconds"),
}


class CertificateError(ValueError):
    """A certificate that does not prove what it claims."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The fields that certificates of both kinds have.

    Args:
        kind: "fixed_total" or "max_throughput".
        profiles_sha256: the fingerprint of the profiles that it is about.
        allow_accumulation: whether more than one micro-batch a rank was allowed.
        bucket_seconds: of each bucket on the network, None without overlap.
        shard_groups: ranks with equal numbers of micro-batches, None: each rank alone.
        total: samples in the global batch.
        micro_batches: (size, number) of each rank.
        step_seconds: seconds of the step.
    """

    kind: str
    profiles_sha256: str
    allow_accumulation: bool
    bucket_seconds: list[float] | None
    shard_groups: list[list[int]] | None
    total: int
    micro_batches: list[tuple[int, int]]
    step_seconds: float

    @property
    def groups(self) -> list[list[int]]:
        """The ranks that have equal numbers of micro-batches."""
        if self.shard_groups is None or not self.allow_accumulation:
            return [[rank] for rank in range(len(self.micro_batches))]
        return self.shard_groups


def read_claim(certificate: Mapping[str, Any], ranks: int) -> Claim:
    """The common fields of a certificate for `ranks` ranks.

    Raises:
        CertificateError: keys are missing or unknown, or a value is not of its kind.
    """
    if not isinstance(certificate, Mapping):
        raise CertificateError(f"found {certificate!r:.200}, expected an object: make the plan again")
    kind = certificate.get("kind")
    if kind not in KINDS:
        raise CertificateError(f"found kind {kind!r:.60}, expected one of {KINDS}: make the plan again")
    keys = {*_COMMON, *_OWN[kind]}
    if set(certificate).difference(_OPTIONAL[kind]) != keys:
        raise CertificateError(
            f"found the keys {sorted(map(str, certificate))!s:.400}, expected an object with the keys {sorted(keys)}"
        )
    digest = certificate["profiles_sha256"]
    _require(isinstance(digest, str), "profiles_sha256", digest, "a text")
    allow = certificate["allow_accumulation"]
    _require(isinstance(allow, bool), "allow_accumulation", allow, "true or false")
    buckets = certificate["bucket_seconds"]
    if buckets is not None:
        known = isinstance(buckets, list) and all(map(is_seconds, buckets))
        _require(known, "bucket_seconds", buckets, "null or a list of finite seconds of at least 0")
        buckets = [float(value) for value in buckets]
    groups = certificate["shard_groups"]
    if groups is not None:
        known = isinstance(groups, list) and all(is_integers(group) and group for group in groups)
        known = known and sorted(rank for group in groups for rank in group) == list(range(ranks))
        _require(known, "shard_groups", groups, f"null or lists with each of the {ranks} ranks once")
    total = certificate["total_batch_size"]
    _require(is_integer(total), "total_batch_size", total, "an integer")
    pairs = certificate["micro_batches"]
    known = isinstance(pairs, list) and len(pairs) == ranks
    known = known and all(is_integers(pair) and len(pair) == 2 for pair in pairs)
    _require(known, "micro_batches", pairs, f"a list of {ranks} pairs of integers, one a rank")
    step = certificate["step_seconds"]
    _require(is_seconds(step) and step > 0, "step_seconds", step, "a positive and finite number")
    return Claim(kind, digest, allow, buckets, groups, total, [(size, steps) for size, steps in pairs], float(step))


def read_lists(certificate: Mapping[str, Any], key: str, ranks: int) -> list[list[int]]:
    """A field that is a list of integers for each rank. Raises CertificateError."""
    lists = certificate[key]
    known = isinstance(lists, list) and len(lists) == ranks and all(map(is_integers, lists))
    _require(known, key, lists, f"a list of {ranks} lists of integers, one a rank")
    return lists


def read_seconds(certificate: Mapping[str, Any], key: str) -> float:
    """A field that is a finite number of at least 0. Raises CertificateError."""
    value = certificate[key]
    _require(is_seconds(value), key, value, "a finite number of at least 0")
    return float(value)


def read_times(certificate: Mapping[str, Any], key: str) -> list[float]:
    """A field that is a list of positive, increasing numbers, at least one. Raises CertificateError."""
    values = certificate[key]
    known = isinstance(values, list) and values and all(is_seconds(value) and value > 0 for value in values)
    known = known and all(before < after for before, after in zip(values, values[1:], strict=False))
    _require(known, key, values, "a list of increasing, positive and finite numbers, at least one")
    return [float(value) for value in values]


def read_most_steps(certificate: Mapping[str, Any], key: str, allow_accumulation: bool) -> int:
    """The largest number of micro-batches that a rank may have. Raises CertificateError."""
    value = certificate[key]
    if not allow_accumulation:
        _require(value is None, key, value, "null, as accumulation was not allowed")
        return 1
    _require(is_integer(value) and value >= 1, key, value, "an integer of at least 1")
    return value


def read_multiple(certificate: Mapping[str, Any], allow_accumulation: bool) -> int:
    """The number that the total had to be a multiple of; 1: any total was allowed. Raises CertificateError."""
    if "multiple_of" not in certificate:
        return 1
    value = certificate["multiple_of"]
    known = is_integer(value) and value >= 1 and not allow_accumulation
    _require(known, "multiple_of", value, "an integer of at least 1, without accumulation")
    return value


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of 64 bits and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_integers(value: object) -> bool:
    """Whether `value` is a list of integers of 64 bits."""
    return isinstance(value, list) and all(map(is_integer, value))


def is_seconds(value: object) -> bool:
    """Whether `value` is a finite number of seconds of at least 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LONGEST_SECONDS


def _require(holds: object, key: str, value: object, expected: str) -> None:
    if not holds:
        raise CertificateError(f"found {key} {value!r:.200}, expected {expected}: make the plan again")
