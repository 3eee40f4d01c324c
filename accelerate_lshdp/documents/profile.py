# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``Profile``: the result of one profiling run, as the file that the planner reads. Needs no torch.

The module also reads and writes the short form that plans made without the ``profile`` command carry in their
``profile`` section.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from accelerate_lshdp.documents.atomic_files import write_atomically
from accelerate_lshdp.documents.cluster import Cluster
from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.profile_sections import MeasuredRank, Network, ProfiledScript
from accelerate_lshdp.documents.records import (
    LARGEST_COUNT,
    OBJECT,
    Record,
    Value,
    entry,
    integer,
    member,
    number,
    optional,
    record,
    records,
    several,
)
from accelerate_lshdp.documents.strategy import Gathered, Strategy
from accelerate_lshdp.documents.strict_reading import parse_json, require_json
from accelerate_lshdp.documents.unit_sizes import ModelUnits
from accelerate_lshdp.documents.value_checks import PlanError, describe, require_name


PROFILE_VERSION = 1
PROFILE_KIND = "profile"
_SHORT_KEYS = {"rank", "batch_sizes", "seconds", "max_micro_batch_size"}


class ProfileError(ValueError):
    """A profile that cannot be read, is malformed, or cannot be written."""


def _accept_versions(value: Any, path: str) -> dict[str, str]:
    for library, version in OBJECT.accept(value, path).items():
        require_name(version, f"{path}.{library}", "a version")
    return dict(value)


@dataclass(frozen=True, slots=True)
class Profile(Record):
    """The result of one profiling run; the same value on all ranks.

    Args:
        strategy: the strategy that memory and communication were measured for.
        subject: the script that was profiled, and the size of its model.
        cluster: the nodes, in rank order.
        ranks: one entry a rank, in rank order.
        bucket_bytes: bytes of each gradient bucket on the wire, in the order in which buckets travel.
        network: measured message times; None for a single rank.
        measured_seconds: seconds that the profiling run took.
        versions: version of each library that was measured, by its name.
        units: the sizes of the model's units, which placements are planned from; None: not measured.

    Raises:
        ProfileError: an impossible or contradicting value; it says where.
    """

    strategy: Strategy = entry(member(Strategy))
    subject: ProfiledScript = entry(record(ProfiledScript))
    cluster: Cluster = entry(record(Cluster))
    ranks: tuple[MeasuredRank, ...] = entry(records(MeasuredRank, "rank"))
    # Up to 64 bits: bytes of a model, not samples, whose limit is lower.
    bucket_bytes: tuple[int, ...] = entry(several(integer(least=1, most=LARGEST_COUNT)))
    # JSON null: a single rank has nobody to send to.
    network: Network | None = entry(optional(record(Network)))
    measured_seconds: float = entry(number())
    versions: dict[str, str] = entry(Value(_accept_versions, write=dict))
    units: ModelUnits | None = entry(optional(record(ModelUnits)), default=None, omit=True)

    def __post_init__(self) -> None:
        with _profile_errors():
            Record.__post_init__(self)

    def _check_together(self) -> None:
        if sum(self.cluster.node_sizes) != len(self.ranks):
            raise PlanError(
                f"found {len(self.ranks)} ranks, expected {sum(self.cluster.node_sizes)}, those of the nodes in"
                " cluster. Measure again.",
                path="ranks",
            )
        for place, rank in enumerate(self.ranks):
            if rank.rank != place:
                raise PlanError(
                    f"found rank {rank.rank}, expected {place}: ranks stand in order. Measure again.",
                    path=f"ranks[{place}].rank",
                )
            if len(rank.bucket_ready) != len(self.bucket_bytes):
                raise PlanError(
                    f"found {len(rank.bucket_ready)} curves for {len(self.bucket_bytes)} buckets, expected one for"
                    " each. Measure again.",
                    path=f"ranks[{place}].bucket_ready",
                )

    # What planning needs

    def rank_profiles(self) -> list[RankProfile]:
        """The times and limits of all ranks, for the planners.

        Where ranks gather parameters anew for every micro-batch, each but the last takes that much longer; seconds of
        one micro-batch's gathers are in `communication_seconds`.
        """
        again = self._gathers_of_a_micro_batch() * self._half_all_reduces()
        profiles = [rank.profile() for rank in self.ranks]
        return [
            replace(own, accumulation_overhead_seconds=own.accumulation_overhead_seconds + again) for own in profiles
        ]

    def time_hint(self, micro_batches: Sequence[tuple[int, int]]) -> str | None:
        """One sentence about ranks that might train more if profiling had had more time; None if there is none.

        Args:
            micro_batches: (size, accumulation steps) of each rank in a plan.
        """
        short = [
            rank.rank
            for rank, (size, _) in zip(self.ranks, micro_batches, strict=True)
            if rank.limited_by == "time" and size == rank.max_micro_batch_size
        ]
        if not short:
            return None
        found = ", ".join(f"{self.ranks[rank].max_micro_batch_size} samples on rank {rank}" for rank in short)
        return (
            f"The plan has the largest micro-batches that there was time to measure ({found}); larger ones may be"
            " faster. Profile for longer."
        )

    def bucket_seconds(self) -> list[float] | None:
        """Seconds of each bucket's all-reduce; None where no communication overlaps with the backward.

        That is so on a single rank, and under the world-sharded strategies, whose ranks wait while a unit is gathered
        or reduced.
        """
        if self.network is None or not self.bucket_bytes or self.strategy.is_world_sharded:
            return None
        return [self.network.all_reduce.seconds(size) for size in self.bucket_bytes]

    def communication_seconds(self) -> float:
        """Seconds of a step of one micro-batch that gradients and gathered parameters take on the network.

        An all-reduce is a reduce-scatter and an all-gather; ``fsdp`` gathers once more, for the backward.
        """
        gathers_twice = self.strategy.is_world_sharded and self.strategy.traits.gathered is Gathered.EACH_PASS
        return (3 if gathers_twice else 2) * self._half_all_reduces()

    def _half_all_reduces(self) -> float:
        """Seconds of an all-gather of all parameters, or a reduce-scatter: in a ring each is half of an all-reduce."""
        if self.network is None:
            return 0.0
        return sum(self.network.all_reduce.seconds(size) for size in self.bucket_bytes) / 2

    def _gathers_of_a_micro_batch(self) -> int:
        """How often all ranks gather all parameters for a micro-batch that is not the first of its step."""
        if not self.strategy.is_world_sharded:
            return 0
        return {Gathered.EACH_PASS: 2, Gathered.EACH_MICRO_BATCH: 1, Gathered.EACH_STEP: 0}[
            self.strategy.traits.gathered
        ]

    def shard_groups(self) -> list[list[int]]:
        """The ranks that share one copy of the parameters, group by group, as the engine will form them.

        Nodes with different numbers of ranks have one copy each where it is in host memory, which the ranks share: on
        CPUs, and on devices if the strategy keeps it there.
        """
        sizes = self.cluster.node_sizes
        ends = list(accumulate(sizes))
        if self.strategy.is_world_sharded:
            return [list(range(ends[-1]))]
        # Shared memory serves nodes of any size; FSDP2's groups need the same number of ranks on each node.
        in_host_memory = self.strategy.is_offloaded or all(node.trains_on_cpu for node in self.cluster.nodes)
        if self.strategy.is_node_sharded and (in_host_memory or len(set(sizes)) == 1):
            return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        return [[rank] for rank in range(ends[-1])]

    # As a file

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON values, in the layout of a profile file."""
        return {"version": PROFILE_VERSION, "kind": PROFILE_KIND, **Record.to_dict(self)}

    @classmethod
    def from_dict(cls, document: object) -> Profile:
        """The profile in a profile file's layout.

        Raises:
            ProfileError: unknown or missing keys, wrong types, impossible or contradicting values; it says where.
        """
        with _profile_errors():
            require_json(document)
            _require_kind(document)
            return cls(**cls._read_entries(document, also=("version", "kind")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """The profile in a file.

        Raises:
            ProfileError: as `from_dict`, and for a file that cannot be read or is not JSON.
        """
        expected = "expected a profile that `accelerate-lshdp profile` wrote. Give the path of one"
        try:
            document = parse_json(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{os.fspath(path)}: found nothing that can be read ({error}), {expected}") from error
        except PlanError as error:
            raise ProfileError(f"{os.fspath(path)}: found no JSON document, {expected}") from error
        with _profile_errors(f"{os.fspath(path)}: "):
            return cls.from_dict(document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile file. Whatever happens, `path` holds the old file or the whole new one.

        Raises:
            ProfileError: the file cannot be written.
        """
        try:
            write_atomically(Path(path), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise ProfileError(
                f"{os.fspath(path)}: cannot write the profile ({error.strerror}). Give a file name in a writable"
                " directory"
            ) from error


@contextmanager
def _profile_errors(before: str = "") -> Iterator[None]:
    """Turns each ValueError in the block into a `ProfileError` whose message begins with `before`."""
    try:
        yield
    except ValueError as error:
        raise ProfileError(f"{before}{error}") from error


def _require_kind(document: object) -> None:
    """Checks that a document is a profile of this version; called first, as a wrong kind may break other checks."""
    if not isinstance(document, dict):
        return  # `require_object` says what is wrong
    for key, expected in (("kind", PROFILE_KIND), ("version", PROFILE_VERSION)):
        found = document.get(key)
        # The types too, as True == 1.
        if type(found) is not type(expected) or found != expected:
            raise PlanError(
                f"found {describe(found)}, expected {json.dumps(expected)}: this is no profile, or one of another"
                " version of accelerate_lshdp. Write one with `accelerate-lshdp profile`.",
                path=key,
            )


def write_profiles(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """The short form of profiles: ``{"ranks": [{"rank", "batch_sizes", "seconds", "max_micro_batch_size"}, ...]}``."""
    return {
        "ranks": [
            {
                "rank": rank,
                "batch_sizes": list(profile.time.batch_sizes),
                "seconds": list(profile.time.seconds),
                "max_micro_batch_size": profile.max_micro_batch_size,
            }
            for rank, profile in enumerate(profiles)
        ]
    }


def read_profiles(document: Mapping[str, Any]) -> list[RankProfile]:
    """The ranks in a plan's ``profile`` section, which is a whole `Profile` or the short form of `write_profiles`.

    Raises:
        ValueError: it does not describe ranks 0, 1, ... in order, or a value is impossible.
    """
    if isinstance(document, Mapping) and document.get("kind") == PROFILE_KIND:
        return Profile.from_dict(document).rank_profiles()
    entries = document.get("ranks") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"found {document!r:.200}, expected an object with a list of ranks: measure the ranks again")
    profiles = []
    for rank, found in enumerate(entries):
        if not isinstance(found, Mapping) or set(found) != _SHORT_KEYS or found["rank"] != rank:
            raise ValueError(
                f"found {found!r:.200} at place {rank} of the profile, expected rank {rank} with"
                f" {sorted(_SHORT_KEYS)}: measure the ranks again"
            )
        try:
            curve = TimeCurve(found["batch_sizes"], found["seconds"])
            profiles.append(RankProfile(curve, found["max_micro_batch_size"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the profile of rank {rank}: {error}") from error
    return profiles
