# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A valid plan document for tests to change."""

from __future__ import annotations

from typing import Any


def document() -> dict[str, Any]:
    """A valid plan with every section, as JSON values."""
    return {
        "version": 1,
        "strategy": "lsdp",
        "batch": {
            "total": 16,
            "allow_unequal_accumulation": False,
            "ranks": [
                {"rank": 0, "micro_batch_size": 11, "accumulation_steps": 1},
                {"rank": 1, "micro_batch_size": 5, "accumulation_steps": 1},
            ],
        },
        "communication": {"dtype": "fp32"},
        "cluster": {
            "nodes": [
                {"ranks": 1, "address": "10.0.0.1", "device": "cuda"},
                {"ranks": 1, "address": None, "device": None},
            ],
            "link": {"bandwidth_bits_per_second": 1e9, "latency_seconds": 1e-4},
        },
        "profile": {"curves": [[1, 0.5], [2, 1.0]]},
        "predicted": {"step_seconds": 0.5, "idle_fraction": 0.02},
        "certificate": {"bound": 3},
    }
