# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The sections of a plan that change training, as JSON values, and the digest by which ranks compare plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from accelerate_lshdp.documents.plan_sections import Automatic, Batch, Cluster, Communication
from accelerate_lshdp.documents.strategy import Strategy


def training_sections(
    strategy: Strategy,
    communication: Communication,
    *,
    batch: Batch | None,
    automatic: Automatic | None,
    cluster: Cluster | None,
) -> dict[str, Any]:
    """The sections in the layout of a plan file; those that a plan does not have are None."""
    batch_section = None
    if batch is not None:
        batch_section = {
            "total": batch.total,
            "allow_unequal_accumulation": batch.allow_unequal_accumulation,
            "ranks": [asdict(entry) for entry in batch.ranks],
        }
    cluster_section = None
    if cluster is not None:
        link = None if cluster.link is None else asdict(cluster.link)
        cluster_section = {"nodes": [asdict(node) for node in cluster.nodes], "link": link}
    return {
        "strategy": strategy.value,
        "batch": batch_section,
        "automatic": None if automatic is None else automatic.to_dict(),
        "communication": communication.to_dict(),
        "cluster": cluster_section,
    }


def digest_of(sections: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of `training_sections`; of a plan with automatic batch sizes without its section `batch`."""
    # Automatic sizes change the speed only. Plans written before that section existed keep their digest.
    left_out = "automatic" if sections["automatic"] is None else "batch"
    document = {name: section for name, section in sections.items() if name != left_out}
    # Sorted keys and no blanks: equal plans have equal bytes, whatever order their files have.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
