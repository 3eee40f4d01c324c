# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Made-up contents of ``results.json``: four uneven ranks, with the costs that such a cluster would have."""

from __future__ import annotations

import math
from typing import Any


NETWORKS = {"1 Gb/s": 1e9, "250 Mb/s": 0.25e9}
SPEEDS = (10.0, 6.2, 5.0, 3.8)  # samples a second, forward and backward
EQUAL, UNEQUAL = [8, 8, 8, 8], [13, 8, 6, 5]
GRADIENT_BYTES = 57e6
OPTIMIZER_SECONDS = 0.06
FEW = ("torch_ddp", "lshdp")
MANY = (
    *("torch_ddp", "torch_fsdp", "torch_hsdp", "ddp", "hdp", "fsdp", "fsdp_offload", "zero2", "group_sharding"),
    *("lsdp", "lshdp", "lshdp:bf16", "lshdp:int8", "lshdp:powersgd"),
)
_UNEQUAL = ("hdp", "lshdp")
_SHARES_ON_THE_WIRE = {"fp32": 1.0, "bf16": 0.5, "int8": 0.26, "powersgd": 0.04}
_TRAVELS = {"torch_fsdp": 1.5, "fsdp": 1.5, "fsdp_offload": 1.5}  # x an all-reduce


def make_case(strategy: str, network: str = "1 Gb/s", **changes: Any) -> dict[str, Any]:
    """One case; `strategy` may name a format: ``lshdp:int8``."""
    name, _, dtype = strategy.partition(":")
    dtype = dtype or "fp32"
    sizes = UNEQUAL if name in _UNEQUAL else EQUAL
    is_peer = name.startswith("torch_")
    sent = 1.5 * GRADIENT_BYTES * _TRAVELS.get(name, 1.0) * _SHARES_ON_THE_WIRE[dtype]
    compute = [size / speed for size, speed in zip(sizes, SPEEDS, strict=True)]
    travel = 8 * sent / NETWORKS[network] * (1.0 if name in _TRAVELS else 0.7)
    step = max(compute) + travel + OPTIMIZER_SECONDS
    figures = {
        "batch_sizes": sizes,
        "step_seconds": step,
        "spread": 0.02,
        "round_seconds": [step * (1 + 0.02 * (place - 1)) for place in range(3)],
        "samples_per_second": sum(sizes) / step,
        "compute_seconds": None if is_peer else compute,
        "wait_seconds": None if is_peer else [step - seconds - OPTIMIZER_SECONDS for seconds in compute],
        "optimizer_seconds": None if is_peer else [OPTIMIZER_SECONDS] * 4,
        "idle_fraction": None if is_peer else 1 - sum(compute) / 4 / max(compute),
        "bytes_between_nodes": [sent * 1.004] * 4,
        "formula_bytes": [sent] * 4,
        "bytes_inside_nodes": [0.0] * 4,
        "peak_pss_bytes": [int(1e9 + 1e7 * size * (2 if is_peer else 1)) for size in sizes],
        "peak_rank_bytes": [int(1e9 + 1e7 * size) for size in sizes],
        "predicted_seconds": None if is_peer else step * 1.03,
        "slowdown": 1.01,
        "losses": _losses(step, wobble=0.0 if dtype == "fp32" else 0.02),
        "timeline": None if is_peer else [_timeline(seconds, step) for seconds in compute],
        "error": None,
    }
    return {
        "cluster": "uneven 4x1",
        "model": "ViT 14 M",
        "parameters": 14_300_000,
        "network": network,
        "bits_per_second": NETWORKS[network],
        "strategy": name,
        "communication_dtype": dtype,
        "label": name if is_peer else f"{name} {dtype}",
        "is_peer": is_peer,
        "nodes": [1, 1, 1, 1],
        "total_batch_size": 32,
        **figures,
        **changes,
    }


def make_failed_case(strategy: str, error: str, **changes: Any) -> dict[str, Any]:
    """A case without figures."""
    case = make_case(strategy, **changes)
    place = list(case)
    figures = place[place.index("step_seconds") :]
    return {**case, **dict.fromkeys(figures), "error": error}


def make_results(strategies: tuple[str, ...] = FEW, networks: tuple[str, ...] = ("1 Gb/s",)) -> dict[str, Any]:
    """A whole document."""
    return {
        "version": 1,
        "kind": "benchmark",
        "created": "2026-11-20T12:00:00+00:00",
        "command": "accelerate-lshdp bench uneven.yaml --output-dir outputs/bench",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_bytes": 16 * 10**9, "kernel": "6.1.0"},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "config": {"networks": list(networks), "strategies": list(strategies), "batch": {"total": 32}},
        "wall_seconds": 960.0,
        "cases": [make_case(strategy, network) for network in networks for strategy in strategies],
        "limits": [{"name": "lshdp against torch_ddp", "value": 0.31, "limit": 0.28, "holds": True}],
    }


def _losses(step_seconds: float, wobble: float) -> list[list[float]]:
    return [
        [step * step_seconds, step, 2.3 * math.exp(-step / 25) + 0.15 + (0.05 + wobble) * math.sin(7.0 * step)]
        for step in range(1, 81)
    ]


def _timeline(compute: float, step: float) -> list[dict[str, Any]]:
    moments = {"data": 0.01, "forward": compute / 3, "backward": compute * 2 / 3}
    moments["wait"] = step - 0.01 - compute - OPTIMIZER_SECONDS
    moments["optimizer"] = OPTIMIZER_SECONDS - 0.01
    events, now = [], 1000.0
    for name, seconds in moments.items():
        events.append({"name": name, "begin": now, "end": now + seconds})
        now += seconds
    return events
