# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measured GPU curves, and random clusters made of them.

The data are forward and backward times of one transformer layer on 16 kinds of GPU, measured by the authors of Cephalo
(benson-guo/cephalo, MIT License): one curve for each (model, GPU, sequence length, dtype), whose entry i is batch size
i + 1. They are not part of this project.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


ENVIRONMENT = "LSHDP_GPU_CURVES"
DEFAULT_PATH = Path(__file__).resolve().parents[2] / "shared" / "data" / "gpu_time_curves.json"
# Samples for each GPU that the smallest global batch has.
LEAST_SAMPLES_A_GPU = 2

#: Seconds at batch sizes 1, 2, ...: float64, shape [largest batch size]. Measured, so not always increasing.
Curve = np.ndarray


@dataclass(frozen=True)
class CurveFamily:
    """The curves of one workload (model, sequence length, dtype), by GPU."""

    name: str
    curves: Mapping[str, Curve]


@dataclass(frozen=True)
class Cluster:
    """GPUs that train one workload together, and the global batch that they share."""

    family: str
    gpus: tuple[str, ...]
    curves: tuple[Curve, ...]
    total_batch_size: int


def curves_path(given: str | None) -> Path:
    """The data file: what was given, else the environment variable, else the place beside the repository.

    Raises:
        FileNotFoundError: it is not there; the message says how to name another place.
    """
    path = Path(given or os.environ.get(ENVIRONMENT) or DEFAULT_PATH)
    if not path.is_file():
        raise FileNotFoundError(
            f"found no file {path}, expected the measured GPU curves: name it with --curves PATH or {ENVIRONMENT}"
        )
    return path


def load_families(path: Path) -> tuple[list[CurveFamily], dict[str, int]]:
    """All workloads that were measured on at least two kinds of GPU, in the order of their names.

    Returns:
        The families, and how many curves were left out, by reason.

    Raises:
        ValueError: the file holds no usable family.
    """
    skipped = {"empty, unequal in length, or with times that are not positive": 0, "the only GPU of its workload": 0}
    broken, alone = skipped
    found: dict[str, dict[str, Curve]] = {}
    for entry in json.loads(path.read_text(encoding="utf-8"))["curves"]:
        curve = _seconds(entry)
        if curve is None:
            skipped[broken] += 1
            continue
        name = f"{entry['model']}, sequence length {entry['sequence_length']}, {entry['dtype']}"
        found.setdefault(name, {})[entry["gpu"]] = curve
    families = [CurveFamily(name, curves) for name, curves in sorted(found.items()) if len(curves) > 1]
    skipped[alone] = sum(len(curves) for curves in found.values() if len(curves) == 1)
    if not families:
        raise ValueError(f"found no workload measured on two kinds of GPU in {path}, expected at least one")
    return families, skipped


def draw_clusters(families: Sequence[CurveFamily], gpus: int, count: int, seed: int) -> list[Cluster]:
    """Random clusters of ``gpus`` GPUs, fixed by the seed.

    A family is as likely as it has curves, its GPUs are drawn with replacement, and the global batch is anything from
    a few samples a GPU to the sum of the maxima.
    """
    generator = np.random.default_rng([seed, gpus])
    family_of_each_curve = [family for family in families for _ in family.curves]
    clusters = []
    for _ in range(count):
        family = family_of_each_curve[generator.integers(len(family_of_each_curve))]
        names = tuple(str(name) for name in generator.choice(sorted(family.curves), size=gpus))
        curves = tuple(family.curves[name] for name in names)
        most = sum(len(curve) for curve in curves)
        total = int(generator.integers(min(LEAST_SAMPLES_A_GPU * gpus, most), most + 1))
        clusters.append(Cluster(family.name, names, curves, total))
    return clusters


def _seconds(entry: Mapping[str, Any]) -> Curve | None:
    """Forward and backward together in seconds; None if the entry is no curve."""
    forward, backward = entry["forward_ms"], entry["backward_ms"]
    usable = len(forward) == len(backward) > 0 and all(math.isfinite(x) and x > 0 for x in [*forward, *backward])
    return (np.array(forward) + np.array(backward)) / 1000 if usable else None
