# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The planning problem of both planners: the ranks' step times and the options, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.planning.cuts.step_time import PlanningError, StepTimes, step_times
from accelerate_lshdp.planning.proofs.digest import profiles_sha256


# Relative tolerance. Two curves can reach the same time at different sizes and come out a few units in the last place
# apart. Such times count as equal, so that rounding does not decide between cuts.
TIE = 1e-13


@dataclass(frozen=True, slots=True)
class Problem:
    """The ranks and options of one planning problem.

    Args:
        profiles: one for each rank.
        times: the step times of each rank.
        allow_accumulation: whether ranks may have more than one micro-batch.
        bucket_seconds: of each bucket of gradients on the network, None without overlap.
        shard_groups: as given, ranks and groups sorted; None: each rank alone.
    """

    profiles: Sequence[RankProfile]
    times: list[StepTimes]
    allow_accumulation: bool
    bucket_seconds: list[float] | None
    shard_groups: list[list[int]] | None

    @property
    def groups(self) -> list[list[int]]:
        """The ranks that have equal numbers of micro-batches, groups in the order of their first ranks."""
        if self.shard_groups is None or not self.allow_accumulation:
            return [[rank] for rank in range(len(self.times))]
        return self.shard_groups

    @property
    def largest(self) -> list[int]:
        """The largest micro-batch of each rank."""
        return [len(time.first) for time in self.times]

    def statement(self) -> dict[str, Any]:
        """The part of a certificate that states the problem: JSON values."""
        return {
            "profiles_sha256": profiles_sha256(self.profiles),
            "allow_accumulation": self.allow_accumulation,
            "bucket_seconds": self.bucket_seconds,
            "shard_groups": self.shard_groups,
        }


def pose_problem(
    profiles: Sequence[RankProfile],
    allow_accumulation: bool,
    bucket_seconds: Sequence[float] | None,
    shard_groups: Sequence[Sequence[int]] | None,
) -> Problem:
    """The problem of the arguments that both planners take, checked.

    Raises:
        PlanningError: there is no rank, no micro-batch fits a rank's memory, buckets and profiles do not match, or the
            groups do not cover each rank once.
    """
    if not isinstance(allow_accumulation, bool):
        raise PlanningError(f"found allow_accumulation {allow_accumulation!r}, expected True or False")
    profiles = list(profiles)
    times = step_times(profiles, bucket_seconds)
    return Problem(
        profiles,
        times,
        allow_accumulation,
        None if bucket_seconds is None else [float(seconds) for seconds in bucket_seconds],
        None if shard_groups is None else _checked_groups(shard_groups, len(profiles)),
    )


def is_integer(value: object) -> bool:
    """Whether `value` is an integer, NumPy's included; True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _checked_groups(shard_groups: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    groups = [list(group) for group in shard_groups]
    members = [rank for group in groups for rank in group]
    if not all(map(is_integer, members)) or sorted(members) != list(range(ranks)) or not all(groups):
        raise PlanningError(
            f"found shard_groups {groups!r:.200}, expected each rank of 0 to {ranks - 1} in exactly one group, and no"
            " empty group"
        )
    return sorted(sorted(map(int, group)) for group in groups)
