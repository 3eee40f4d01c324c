# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A share of a CPU core for a process, by the kernel's own means: cgroup quotas, version 1 or 2.

    with CpuQuota("rank0", share=0.3) as quota:
        quota.add(pid)              # with all its threads, and what it starts from now on
        quota.set_share(0.15)       # at once

In every period the kernel lets the group run for share x period seconds and then stops it until the period ends. Short
periods make the speed smoother. CPU time clocks do not count the time stopped: measure wall time.
"""

from __future__ import annotations

import atexit
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


#: Groups are named PREFIX + process id of the creator + number + name.
PREFIX = "lshdp-"
# The kernel's limits, in microseconds.
_LEAST_QUOTA, _LEAST_PERIOD, _LONGEST_PERIOD = 1_000, 1_000, 1_000_000
_numbers = itertools.count()


@dataclass(frozen=True)
class CpuHierarchy:
    """Where the cpu controller is mounted: groups are directories in it.

    Args:
        root: the mount point.
        version: of cgroups, 1 or 2.
    """

    root: Path
    version: int

    @staticmethod
    def find(mounts: Path = Path("/proc/self/mounts")) -> CpuHierarchy | None:
        """The hierarchy that controls the CPU; None if there is none (not Linux, or not mounted)."""
        if not mounts.is_file():
            return None
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, folder, kind, options, *_ = line.split()
            if kind == "cgroup" and "cpu" in options.split(","):
                return CpuHierarchy(Path(folder), 1)
            controllers = Path(folder, "cgroup.controllers")
            if kind == "cgroup2" and controllers.is_file() and "cpu" in controllers.read_text().split():
                return CpuHierarchy(Path(folder), 2)
        return None

    def limit(self, group: Path, share: float, period_seconds: float) -> None:
        """Sets the quota of a group."""
        quota, period = quota_microseconds(share, period_seconds)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota} {period}")
            return
        # In the old version quota and period are two files, and the kernel refuses some combinations of the new one
        # with the old other: without a quota every period is possible.
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(quota))

    def let_groups_be_limited(self) -> None:
        """In version 2 a directory's groups have a controller only if the directory passes it on."""
        if self.version == 2:
            passed_on = self.root / "cgroup.subtree_control"
            if "cpu" not in passed_on.read_text().split():
                passed_on.write_text("+cpu")


class CpuQuota:
    """A group of processes that together get a share of one core, until it is removed.

    Use it as a context manager; a group that is still there at exit is removed then. Groups that a run left behind
    when it was killed are removed by the next one.

    Args:
        name: part of the group's name, for people who look at it.
        share: of one core, more than 0; 1.5 is one and a half cores.
        period_seconds: from 0.001 to 1; share x period at least 0.001.

    Raises:
        ValueError: an impossible share or period.
        RuntimeError: quotas are not available here (see `available`).
    """

    def __init__(self, name: str, share: float, period_seconds: float = 0.1) -> None:
        quota_microseconds(share, period_seconds)
        hierarchy = CpuHierarchy.find()
        reason = _refusal(hierarchy)
        if reason is not None:
            raise RuntimeError(f"CPU quotas cannot be used here: {reason}")
        self._hierarchy = hierarchy
        self._period_seconds = period_seconds
        self.share = share
        _remove_leftovers(hierarchy.root)
        self.path = hierarchy.root / f"{PREFIX}{os.getpid()}-{next(_numbers)}-{name}"
        self.path.mkdir()
        atexit.register(self.remove)
        try:
            self.set_share(share)
        except BaseException:
            self.remove()
            raise

    @staticmethod
    def available() -> str | None:
        """None if quotas can be used here, else the reason why not. It tries."""
        hierarchy = CpuHierarchy.find()
        reason = _refusal(hierarchy)
        if reason is None:
            try:
                CpuQuota("try", 0.5).remove()
            except OSError as error:
                return f"the kernel refuses a quota in {hierarchy.root}: {error}"
        return reason

    def set_share(self, share: float) -> None:
        """Changes the share; processes that are running feel it within a period.

        Raises:
            ValueError: an impossible share.
        """
        self._hierarchy.limit(self.path, share, self._period_seconds)
        self.share = share

    def add(self, pid: int) -> None:
        """Puts a process with all its threads into the group; what it starts later joins too."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Gives processes that are left their full speed back and removes the group. Safe to call again."""
        atexit.unregister(self.remove)
        if not self.path.is_dir():
            return
        for pid in (self.path / "cgroup.procs").read_text().split():
            try:
                (self.path.parent / "cgroup.procs").write_text(pid)
            except ProcessLookupError:  # it has ended since
                continue
        self.path.rmdir()

    def __enter__(self) -> CpuQuota:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def quota_microseconds(share: float, period_seconds: float) -> tuple[int, int]:
    """Quota and period as the kernel wants them, in microseconds.

    Raises:
        ValueError: the kernel would refuse them.
    """
    period = round(period_seconds * 1e6)
    quota = round(share * period)
    if not _LEAST_PERIOD <= period <= _LONGEST_PERIOD:
        raise ValueError(f"found a period of {period_seconds} s, expected 0.001 to 1")
    if quota < _LEAST_QUOTA:
        raise ValueError(
            f"found {share} of a core in periods of {period_seconds} s, {quota / 1e6} s, expected at least 0.001 s in"
            " each: take a longer period"
        )
    return quota, period


def _refusal(hierarchy: CpuHierarchy | None) -> str | None:
    if hierarchy is None:
        return "no cgroup hierarchy with the cpu controller is mounted"
    if not os.access(hierarchy.root, os.W_OK):
        return f"{hierarchy.root} cannot be written (quotas need root)"
    try:
        hierarchy.let_groups_be_limited()
    except OSError as error:
        return f"{hierarchy.root} does not pass the cpu controller on: {error}"
    return None


def _remove_leftovers(root: Path) -> None:
    """Removes empty groups of this project whose creator is gone. The kernel refuses to remove others' live ones."""
    for group in root.glob(f"{PREFIX}*"):
        creator = group.name.removeprefix(PREFIX).partition("-")[0]
        if creator.isdigit() and not Path("/proc", creator).exists():
            try:
                group.rmdir()
            except OSError:  # processes still run in it, perhaps of another container, where ids differ
                continue
