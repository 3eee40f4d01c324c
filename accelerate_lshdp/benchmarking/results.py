# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Runs a whole benchmark and puts together what ``results.json`` holds."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate_lshdp.benchmarking.config import BenchmarkConfig
from accelerate_lshdp.benchmarking.driver import ClusterBenchmark
from accelerate_lshdp.benchmarking.launches import make_launch


_LIBRARIES = ("torch", "accelerate", "transformers", "accelerate-lshdp")


def run_benchmark(
    config: BenchmarkConfig, *, in_process: bool, command: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measures all clusters with all models.

    Args:
        config: what to measure.
        in_process: on the loopback, without root and without an emulated network.
        command: that reproduces it.
        say: tells whoever waits what is going on.

    Returns:
        The contents of ``results.json``.
    """
    started = time.monotonic()
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    cases: list[dict[str, Any]] = []
    for cluster, nodes in config.clusters.items():
        for model in config.models:
            say(f"cluster {cluster}, model {model}")
            launch = partial(make_launch, nodes, config.threads, in_process)  # takes the crews
            benchmark = ClusterBenchmark(config, cluster, model, launch, say)
            cases += [measurement.to_dict() for measurement in benchmark.run()]
    wall_seconds = time.monotonic() - started
    return {
        "version": 1,
        "kind": "benchmark",
        "created": created,
        "command": command,
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
        "config": {**(config.document or {}), **({"in_process": True} if in_process else {})},
        "wall_seconds": wall_seconds,
        "cases": cases,
        "limits": [limit.judge(cases, wall_seconds) for limit in config.limits],
    }


def describe_machine() -> dict[str, Any]:
    """This machine's processor, cores, memory and kernel."""
    import psutil

    names = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": next(filter(None, names), platform.processor() or platform.machine() or "unknown"),
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }
