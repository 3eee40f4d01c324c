# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The fingerprint of the ranks' profiles, by which a certificate names the curves and limits that it is about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from accelerate_lshdp.documents.curves import RankProfile


def profiles_sha256(profiles: Sequence[RankProfile]) -> str:
    """SHA-256, in hex, of the profiles as JSON with sorted keys and no blanks: every field of every rank, in order."""
    # The load is a newer field, left out where it is 0: plans of earlier versions keep their fingerprint.
    document = [
        {
            "time": [profile.time.batch_sizes, profile.time.seconds],
            "max_micro_batch_size": profile.max_micro_batch_size,
            "accumulation_overhead_seconds": profile.accumulation_overhead_seconds,
            "bucket_ready": profile.bucket_ready
            and [[curve.batch_sizes, curve.seconds] for curve in profile.bucket_ready],
            "fixed_seconds": profile.fixed_seconds,
            "memory": profile.memory and [profile.memory.batch_sizes, profile.memory.bytes],
            "memory_limit_bytes": profile.memory_limit_bytes,
            **({"communication_load_seconds": load} if (load := profile.communication_load_seconds) else {}),
        }
        for profile in profiles
    ]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
