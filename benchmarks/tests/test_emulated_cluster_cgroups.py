# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Control groups really limit processes, can be changed while these run, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from laboratory.emulated_cluster.cgroups import ControlGroup, Hierarchy, quota_microseconds
from laboratory.emulated_cluster.system import PREFIX
from launching import has_ended


REFUSAL = ControlGroup.missing()
MEMORY_REFUSAL = ControlGroup.missing(memory=True)
needs_groups = pytest.mark.skipif(REFUSAL is not None, reason=f"no control groups here: {REFUSAL}")
needs_memory = pytest.mark.skipif(MEMORY_REFUSAL is not None, reason=f"no memory limits here: {MEMORY_REFUSAL}")


@pytest.fixture
def spinning() -> Iterator[psutil.Process]:
    """A process with two threads that want a core each (the interpreter lets one run at a time)."""
    code = (
        "import threading\ndef spin():\n while True: pass\nthreading.Thread(target=spin, daemon=True).start(); spin()"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while psutil.Process(process.pid).num_threads() < 2:
            time.sleep(0.01)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def used_share(process: psutil.Process, seconds: float) -> float:
    """CPU seconds for each wall second; less, never more, on a machine that takes its time between looks at clocks."""

    def cpu() -> float:
        times = process.cpu_times()
        return times.user + times.system

    started, before = time.monotonic(), cpu()
    time.sleep(seconds)
    used = cpu() - before
    return used / (time.monotonic() - started)


def groups_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


@pytest.mark.root
@needs_groups
def test_quota_limits_a_spinning_process_and_changes_while_it_runs(spinning: psutil.Process) -> None:
    with ControlGroup("test", cores=0.3, period_seconds=0.02) as group:
        group.add(spinning.pid)
        time.sleep(0.1)
        # A busy machine can only take more away from it. cpu_times counts hundredths of a second.
        assert 0.02 < used_share(spinning, 1.0) < 0.3 * 1.1
        group.set_cores(0.1)
        time.sleep(0.1)
        assert used_share(spinning, 1.0) < 0.1 * 1.2
        assert group.paths[0].name in groups_of(spinning.pid)
    assert not group.paths[0].exists()
    assert group.paths[0].name not in groups_of(spinning.pid)
    assert spinning.is_running()


@pytest.mark.slow
@pytest.mark.root
@needs_groups
def test_groups_with_more_than_the_machine_has_are_slowed_down_alike() -> None:
    """As nodes that one machine emulates are: with equal claims the slow one would get all, the fast one the rest."""
    limits, processes = (0.9, 0.6), []
    with ExitStack() as made:
        for limit in limits:
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            made.callback(process.wait)
            made.callback(process.kill)
            os.sched_setaffinity(process.pid, [min(os.sched_getaffinity(0))])
            made.enter_context(ControlGroup("test", limit, period_seconds=0.02)).add(process.pid)
            processes.append(psutil.Process(process.pid))

        def used() -> list[float]:
            return [times.user + times.system for times in (process.cpu_times() for process in processes)]

        while min(used()) < 0.1:
            time.sleep(0.01)
        before, _ = used(), time.sleep(2.0)
        used = [now - start for now, start in zip(used(), before, strict=True)]
    assert used[0] / used[1] == pytest.approx(limits[0] / limits[1], rel=0.15)


@pytest.mark.root
@needs_groups
def test_groups_are_removed_after_errors_and_at_exit_and_by_the_next_run() -> None:
    with pytest.raises(RuntimeError, match="in the block"), ControlGroup("test", 0.5) as group:
        raise RuntimeError("in the block")
    assert not group.paths[0].exists()

    code = "import os, signal, subprocess\nfrom laboratory.emulated_cluster.cgroups import ControlGroup\n"
    code += "group = ControlGroup('test', 0.5)\nprint(group.paths[0], flush=True)\n"
    command = [sys.executable, "-c"]
    finished = subprocess.run([*command, code], capture_output=True, text=True, timeout=30, check=True)
    assert finished.stdout.strip() and not Path(finished.stdout.strip()).exists()

    code += "group.add(subprocess.Popen(['sleep', '100'], stdout=-3, stderr=-3).pid)\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([*command, code], capture_output=True, text=True, timeout=30)
    leftover = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL and leftover.is_dir()
    sleeper = int((leftover / "cgroup.procs").read_text())
    with ControlGroup("test", 0.5) as group:
        assert not leftover.exists() and has_ended(sleeper) and group.paths[0].is_dir()
        ControlGroup("another", 0.5).remove()
        assert group.paths[0].is_dir()  # its creator is alive
        assert group.paths[0].name.startswith(f"{PREFIX}{os.getpid()}-")


@pytest.mark.root
@needs_groups
def test_a_group_that_somebody_else_removes_while_its_processes_are_read_is_none_to_remove(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ControlGroup("test", 0.5)
    opened, open_file = [], Path.open

    def open_and_remove(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = open_file(path, *args, **kwargs)
        if path == group.procs_files[0]:
            opened.append(path)
            path.parent.rmdir()
        return file

    monkeypatch.setattr(Path, "open", open_and_remove)
    group.remove()
    assert opened == [group.procs_files[0]] and not group.paths[0].exists()


def test_impossible_quotas_are_refused() -> None:
    assert quota_microseconds(0.3, 0.02) == (6_000, 20_000)
    with pytest.raises(ValueError, match="expected at least 0.001 s in each"):
        quota_microseconds(0.04, 0.02)
    with pytest.raises(ValueError, match="found a period of 2 s"):
        quota_microseconds(0.5, 2)
    with pytest.raises(ValueError, match="expected at least 0.001 s"):
        ControlGroup("test", -1.0)


@pytest.mark.root
@needs_memory
def test_memory_limit_ends_a_process_that_goes_beyond() -> None:
    with ControlGroup("test", cores=1.0, memory_bytes=64 * 2**20) as group:
        # It waits for a line, so that it is in the group before it takes memory.
        code = "input(); data = bytearray({} * 2**20); print(len(data))"
        for mebibytes, expected in ((16, 0), (256, -signal.SIGKILL)):
            command = [sys.executable, "-c", code.format(mebibytes)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            group.add(process.pid)
            process.communicate(b"\n", timeout=30)
            assert process.returncode == expected
    assert not any(path.exists() for path in group.paths)


@pytest.mark.root
@needs_groups
def test_kill_ends_all_processes_of_a_group() -> None:
    with ControlGroup("test", cores=0.5) as group:
        command = ["sh", "-c", "read line; sleep 100 & sleep 100"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        group.add(process.pid)
        process.stdin.write(b"\n")
        process.stdin.close()
        deadline = time.monotonic() + 10
        while len(group.pids()) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        started = group.pids()
        assert len(started) == 3
        group.kill()
        assert process.wait(timeout=5) == -signal.SIGKILL
        assert all(map(has_ended, started))


def test_both_versions_are_found_and_written(tmp_path: Path) -> None:
    """On files; on a machine only one of them can be tried."""
    (tmp_path / "cgroup").write_text("4:memory:/mine\n1:cpu,cpuacct:/elsewhere\n0::/\n")
    (tmp_path / "mine").mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"cgroup {tmp_path} cgroup rw,memory 0 0\ncgroup {tmp_path} cgroup rw,cpu,cpuacct 0 0\n")
    first = Hierarchy.find("cpu", tmp_path)
    assert first == Hierarchy("cpu", 1, tmp_path, parent=tmp_path)
    first.limit_cpu(tmp_path, 0.3, 0.1)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == "30000"
    assert (tmp_path / "cpu.cfs_period_us").read_text() == "100000"
    assert (tmp_path / "cpu.shares").read_text() == "307"
    first = Hierarchy.find("memory", tmp_path)
    assert first == Hierarchy("memory", 1, tmp_path, parent=tmp_path / "mine")
    (tmp_path / "memory.memsw.limit_in_bytes").touch()
    first.limit_memory(tmp_path, 2**30)
    assert (tmp_path / "memory.limit_in_bytes").read_text() == str(2**30)
    assert (tmp_path / "memory.memsw.limit_in_bytes").read_text() == str(2**30)

    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert Hierarchy.find("cpu", tmp_path) is None  # mounted, but without the cpu controller
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    second = Hierarchy.find("cpu", tmp_path)
    assert second == Hierarchy("cpu", 2, tmp_path, parent=tmp_path)
    second.limit_cpu(tmp_path, 1.5, 0.1)
    assert (tmp_path / "cpu.max").read_text() == "150000 100000"
    assert (tmp_path / "cpu.weight").read_text() == "150"
    second.limit_memory(tmp_path, 2**30)
    assert (tmp_path / "memory.max").read_text() == str(2**30)
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    assert second.refusal() is None
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
