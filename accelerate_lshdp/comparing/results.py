# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Puts together ``results.json``: figures of all cases, with machine, versions, configuration and command."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate_lshdp import __version__


_LIBRARIES = ("torch", "accelerate", "transformers")


def measured_results(
    measure: Callable[[], list[dict[str, Any]]],
    judge: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    *,
    machine: Mapping[str, Any],
    config: Mapping[str, Any],
    command: str,
) -> dict[str, Any]:
    """The contents of ``results.json``.

    Args:
        measure: measures all cases and returns their entries.
        judge: makes the entries of limits from those of the cases.
        machine: as `describe_machine` has it.
        config: the contents of the configuration file.
        command: that reproduces it.
    """
    started = time.monotonic()
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    cases = measure()
    wall_seconds = time.monotonic() - started
    libraries = {name: version(name) for name in _LIBRARIES}
    return {
        "version": 1,
        "kind": "benchmark",
        "created": created,
        "command": command,
        "machine": dict(machine),
        # Of this package from its code: it need not be installed as a distribution.
        "versions": {"python": platform.python_version(), **libraries, "accelerate-lshdp": __version__},
        "config": dict(config),
        "wall_seconds": wall_seconds,
        "cases": cases,
        "limits": judge(cases),
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


def all_machines(machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The machines of several nodes as one: their names, and the sums of cores and memory."""
    return {
        **{key: " + ".join(dict.fromkeys(machine[key] for machine in machines)) for key in ("cpu", "kernel")},
        **{key: sum(machine[key] for machine in machines) for key in ("cores", "memory_bytes")},
    }
