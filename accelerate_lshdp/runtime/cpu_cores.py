# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The cores and the CPU time that this process may use, as the kernel tells them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path


_OCTAL = re.compile(r"\\([0-7]{3})")


def allowed_cores(
    cpus: Collection[int], topology: Path = Path("/sys/devices/system/cpu")
) -> tuple[tuple[int, ...], ...]:
    """Groups logical CPUs by core, cores of one package next to each other.

    Args:
        cpus: logical CPUs.
        topology: where the kernel describes them.
    """
    # By core, as its hyperthreads share one set of arithmetic units: two ranks on one core would slow each other down.
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus):
        folder = topology / f"cpu{cpu}" / "topology"
        if (folder / "core_id").is_file():
            core = int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
        else:  # some virtual machines do not tell
            core = 0, cpu
        cores.setdefault(core, []).append(cpu)
    return tuple(tuple(cores[core]) for core in sorted(cores))


def cpu_quota(proc: Path = Path("/proc/self")) -> float | None:
    """CPU seconds per second that control groups (version 1 or 2) allow this process; None: no limit.

    Args:
        proc: where the kernel describes the process.
    """
    if not (proc / "cgroup").is_file():
        return None
    paths = {}
    # Lines are "number:controllers:path"; version 2 has one line, with the controller "".
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    limits = []
    for line in (proc / "mounts").read_text().splitlines():
        # Spaces and their like in the names of folders are written as \040 (proc(5)).
        _, folder, kind, options, *_ = (_OCTAL.sub(lambda code: chr(int(code[1], 8)), word) for word in line.split())
        controller = {"cgroup": "cpu", "cgroup2": ""}.get(kind)
        if controller not in paths or (controller == "cpu" and "cpu" not in options.split(",")):
            continue
        # A group's limit holds for the groups inside it. In a container the path may be that of the host, where
        # only the mount itself exists.
        root, group = Path(folder), Path(folder) / paths[controller].lstrip("/")
        while True:
            limits.append(_limit(group))
            if group == root:
                break
            group = group.parent
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    if (group / "cpu.max").is_file():
        quota, period = (group / "cpu.max").read_text().split()
    elif (group / "cpu.cfs_quota_us").is_file():
        quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def usable_cores(cores: Sequence[Sequence[int]], quota: float | None) -> int:
    """The number of cores that can be busy at the same time under a quota (CPU seconds per second; None: no limit)."""
    # Rounded up: 1.5 cores of quota keep two threads busier than one.
    return len(cores) if quota is None else min(len(cores), max(1, math.ceil(quota)))
