# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measured profiles as JSON values: the ``profile`` section of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_lshdp.planning import RankProfile, TimeCurve


_KEYS = {"rank", "batch_sizes", "seconds", "max_micro_batch_size"}


def write_profiles(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """``{"ranks": [{"rank", "batch_sizes", "seconds", "max_micro_batch_size"}, ...]}``, in rank order."""
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
    """The profiles in what `write_profiles` made, whatever else the document holds.

    Raises:
        ValueError: it does not describe ranks 0, 1, ... in order, or a value is impossible.
    """
    entries = document.get("ranks") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"found {document!r:.200}, expected an object with a list of ranks: measure the ranks again")
    profiles = []
    for rank, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or set(entry) != _KEYS or entry["rank"] != rank:
            raise ValueError(
                f"found {entry!r:.200} at place {rank} of the profile, expected rank {rank} with {sorted(_KEYS)}:"
                " measure the ranks again"
            )
        try:
            curve = TimeCurve(entry["batch_sizes"], entry["seconds"])
            profiles.append(RankProfile(curve, entry["max_micro_batch_size"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the profile of rank {rank}: {error}") from error
    return profiles
