# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Limits on the CPU and the memory of a group of processes, by the kernel's own means: cgroups, version 1 or 2.

    with ControlGroup("rank0", cores=0.3) as group:
        group.add(pid)              # with all its threads, and what it starts from now on
        group.set_cores(0.15)       # at once

In every period the kernel lets the group run for cores x period seconds and then stops it until the period ends. Short
periods make the speed smoother. CPU time clocks do not count the time stopped: measure wall time.

Groups that together may use more than the machine has to give are slowed down alike: each has a claim in proportion to
its limit (up to 100 cores). With equal claims the fastest one would bear all that is missing, whatever the reason.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from laboratory.emulated_cluster.system import PREFIX, ClusterError, is_leftover, unique_name


# The kernel's limits, in microseconds.
_LEAST_QUOTA, _LEAST_PERIOD, _LONGEST_PERIOD = 1_000, 1_000, 1_000_000
_END_SECONDS = 10.0
# Of each version: the file of a group's claim beside others, the claim of one core, and the least and the most that
# the kernel takes. One core's is the kernel's default, and that of its own threads.
_CLAIMS = {1: ("cpu.shares", 1024, 2, 2**18), 2: ("cpu.weight", 100, 1, 10_000)}


@dataclass(frozen=True)
class Hierarchy:
    """Where a controller is mounted: groups are directories in it.

    Args:
        controller: ``cpu`` or ``memory``.
        version: of cgroups, 1 or 2.
        root: the mount point.
        parent: the directory for our groups.
    """

    controller: str
    version: int
    root: Path
    parent: Path

    @staticmethod
    def find(controller: str, proc: Path = Path("/proc/self")) -> Hierarchy | None:
        """The hierarchy of a controller; None if there is none (not Linux, or not mounted)."""
        if not (proc / "mounts").is_file():
            return None
        for line in (proc / "mounts").read_text(encoding="utf-8").splitlines():
            _, folder, kind, options, *_ = line.split()
            root = Path(folder)
            if kind == "cgroup" and controller in options.split(","):
                return Hierarchy(controller, 1, root, _own_group(controller, root, proc / "cgroup"))
            controllers = root / "cgroup.controllers"
            if kind == "cgroup2" and controllers.is_file() and controller in controllers.read_text().split():
                # Below the root only groups without processes of their own may have limited groups in them.
                return Hierarchy(controller, 2, root, root)
        return None

    def refusal(self) -> str | None:
        """Why groups cannot be made here, None if they can."""
        if not os.access(self.parent, os.W_OK):
            return f"{self.parent} cannot be written (control groups need root)"
        passed_on = self.parent / "cgroup.subtree_control"
        try:
            # In version 2 a directory's groups have a controller only if the directory passes it on.
            if self.version == 2 and self.controller not in passed_on.read_text().split():
                passed_on.write_text(f"+{self.controller}")
        except OSError as error:
            return f"{self.parent} does not pass the {self.controller} controller on: {error}"
        return None

    def limit_cpu(self, group: Path, cores: float, period_seconds: float) -> None:
        """Sets how much CPU time a group has in each period, and its claim beside other groups."""
        quota, period = quota_microseconds(cores, period_seconds)
        file, of_one_core, least, most = _CLAIMS[self.version]
        (group / file).write_text(str(min(most, max(least, round(of_one_core * cores)))))
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota} {period}")
            return
        # In the old version quota and period are two files, and the kernel refuses some combinations of the new one
        # with the old other: without a quota every period is possible.
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(quota))

    def limit_memory(self, group: Path, count: int) -> None:
        """Sets how many bytes a group may use, without swap: a machine that swaps is of no use for training."""
        memory, swap = "memory.max", ("memory.swap.max", 0)
        if self.version == 1:
            memory, swap = "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", count)
        (group / memory).write_text(str(count))
        if (group / swap[0]).exists():  # not where the kernel has no swap
            (group / swap[0]).write_text(str(swap[1]))


class ControlGroup:
    """A group of processes that together get so much CPU and memory, until it is removed.

    Use it as a context manager; a group that is still there at exit is removed then. Groups that a run left behind
    when it was killed are removed by the next one, with the processes in them.

    Args:
        name: part of the group's name, for people who look at it.
        cores: CPU seconds per second, more than 0; 0.3 is three tenths of a core.
        memory_bytes: None for no limit.
        period_seconds: from 0.001 to 1; cores x period at least 0.001.

    Raises:
        ValueError: an impossible number of cores or period.
        ClusterError: control groups are not available here (see `missing`).
    """

    def __init__(self, name: str, cores: float, memory_bytes: int | None = None, period_seconds: float = 0.1) -> None:
        quota_microseconds(cores, period_seconds)
        self._cpu = _usable("cpu")
        hierarchies = [self._cpu]
        if memory_bytes is not None:
            hierarchies.append(_usable("memory"))
        remove_leftover_groups()
        self._period_seconds = period_seconds
        self.cores = cores
        name = unique_name(name)
        #: One directory in version 2, one a controller in version 1. The first limits the CPU.
        self.paths = tuple(dict.fromkeys(hierarchy.parent / name for hierarchy in hierarchies))
        atexit.register(self.remove)
        try:
            for path in self.paths:
                path.mkdir()
            self.set_cores(cores)
            if memory_bytes is not None:
                hierarchies[-1].limit_memory(self.paths[-1], memory_bytes)
        except BaseException:
            self.remove()
            raise

    @staticmethod
    def missing(memory: bool = False) -> str | None:
        """None if groups can be used here, else the reason why not. It tries.

        Args:
            memory: whether they shall limit memory, too.
        """
        try:
            ControlGroup("try", 0.5, memory_bytes=2**30 if memory else None).remove()
        except ClusterError as error:
            return str(error)
        except OSError as error:
            return f"the kernel refuses a control group: {error}"
        return None

    @property
    def procs_files(self) -> tuple[Path, ...]:
        """A process that writes its id into these files has joined."""
        return tuple(path / "cgroup.procs" for path in self.paths)

    def set_cores(self, cores: float) -> None:
        """Changes the CPU limit; processes that are running feel it within a period.

        Raises:
            ValueError: an impossible number.
        """
        self._cpu.limit_cpu(self.paths[0], cores, self._period_seconds)
        self.cores = cores

    def add(self, pid: int) -> None:
        """Puts a process with all its threads into the group; what it starts later joins too."""
        for file in self.procs_files:
            file.write_text(str(pid))

    def pids(self) -> list[int]:
        """The processes that are in the group now."""
        return _pids(self.paths[0])

    def kill(self) -> None:
        """Ends all processes of the group (SIGKILL) and waits until they are gone.

        Raises:
            ClusterError: one does not end.
        """
        _kill_all(self.paths[0])

    def remove(self) -> None:
        """Gives processes that are left their full speed back and removes the group. Safe to call again."""
        atexit.unregister(self.remove)
        for path in self.paths:
            _remove_directory(path, _move_out)

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def quota_microseconds(cores: float, period_seconds: float) -> tuple[int, int]:
    """Quota and period as the kernel wants them, in microseconds.

    Raises:
        ValueError: the kernel would refuse them.
    """
    period = round(period_seconds * 1e6)
    quota = round(cores * period)
    if not _LEAST_PERIOD <= period <= _LONGEST_PERIOD:
        raise ValueError(f"found a period of {period_seconds} s, expected 0.001 to 1")
    if quota < _LEAST_QUOTA:
        raise ValueError(
            f"found {cores} of a core in periods of {period_seconds} s, {quota / 1e6} s, expected at least 0.001 s in"
            " each: take a longer period"
        )
    return quota, period


def remove_leftover_groups() -> None:
    """Ends what still runs in groups of this project whose creator is gone, and removes them."""
    hierarchies = filter(None, map(Hierarchy.find, ("cpu", "memory")))
    for path in itertools.chain(*(hierarchy.parent.glob(f"{PREFIX}*") for hierarchy in hierarchies)):
        # Of a creator in another container nothing can be known here: process ids differ.
        if is_leftover(path.name) and all(map(_has_our_process_ids, _procs(path))):
            _remove_directory(path, _kill)


def _own_group(controller: str, root: Path, memberships: Path) -> Path:
    """The directory of this process's own group: what limits it shall limit our groups too. Version 1."""
    for line in memberships.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        own = root / path.lstrip("/")
        if controller in controllers.split(",") and own.is_dir():  # containers mount their own group as the root
            return own
    return root


def _usable(controller: str) -> Hierarchy:
    hierarchy = Hierarchy.find(controller)
    if hierarchy is None:
        raise ClusterError(f"no cgroup hierarchy with the {controller} controller is mounted")
    refusal = hierarchy.refusal()
    if refusal is not None:
        raise ClusterError(refusal)
    return hierarchy


def _procs(path: Path) -> list[int]:
    try:
        return list(map(int, (path / "cgroup.procs").read_text().split()))
    except OSError as error:
        # Somebody else has just removed the group: before the file was opened, or between that and reading it.
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return []


def _pids(path: Path) -> list[int]:
    return [pid for pid in _procs(path) if pid]  # 0 is a process of another container


def _has_our_process_ids(pid: int) -> bool:
    try:
        return pid > 0 and os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except FileNotFoundError:  # it has ended since
        return True


def _kill(path: Path) -> None:
    for pid in _pids(path):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended since
            continue


def _move_out(path: Path) -> None:
    for pid in _pids(path):
        try:
            (path.parent / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:  # it has ended since
            continue


def _kill_all(path: Path) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while pids := _pids(path):
        _kill(path)
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {pids} of {path} had not ended {_END_SECONDS:g} s after SIGKILL")
        time.sleep(0.005)


def _remove_directory(path: Path, make_way: Callable[[Path], None]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while path.is_dir():
        # Each time: a process that was being started can join until the directory is gone.
        make_way(path)
        try:
            path.rmdir()
        except FileNotFoundError:  # somebody else was faster
            return
        except OSError:  # for a moment after its processes have ended the group counts as busy
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
