# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""CPU quotas really limit a process, can be changed while it runs, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from cpu_quota import PREFIX, CpuHierarchy, CpuQuota, quota_microseconds  # noqa: E402


REFUSAL = CpuQuota.available()
needs_quotas = pytest.mark.skipif(REFUSAL is not None, reason=f"no CPU quotas here: {REFUSAL}")


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
    """CPU seconds for each wall second."""

    def cpu() -> float:
        times = process.cpu_times()
        return times.user + times.system

    before, started = cpu(), time.monotonic()
    time.sleep(seconds)
    return (cpu() - before) / (time.monotonic() - started)


def groups_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


@pytest.mark.root
@needs_quotas
def test_quota_limits_a_spinning_process_and_changes_while_it_runs(spinning: psutil.Process) -> None:
    with CpuQuota("test", share=0.3, period_seconds=0.02) as quota:
        quota.add(spinning.pid)
        time.sleep(0.1)
        # A busy machine can only take more away from it. cpu_times counts hundredths of a second.
        assert 0.02 < used_share(spinning, 1.0) < 0.3 * 1.1
        quota.set_share(0.1)
        time.sleep(0.1)
        assert used_share(spinning, 1.0) < 0.1 * 1.2
        assert quota.path.name in groups_of(spinning.pid)
    assert not quota.path.exists()
    assert quota.path.name not in groups_of(spinning.pid)
    assert spinning.is_running()


@pytest.mark.root
@needs_quotas
def test_groups_are_removed_after_errors_and_at_exit_and_by_the_next_run() -> None:
    with pytest.raises(RuntimeError, match="in the block"), CpuQuota("test", 0.5) as quota:
        raise RuntimeError("in the block")
    assert not quota.path.exists()

    code = f"import os, signal, sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
    code += "from cpu_quota import CpuQuota\nprint(CpuQuota('test', 0.5).path, flush=True)\n"
    command = [sys.executable, "-c"]
    finished = subprocess.run([*command, code], capture_output=True, text=True, timeout=30, check=True)
    assert finished.stdout.strip() and not Path(finished.stdout.strip()).exists()

    code += "os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([*command, code], capture_output=True, text=True, timeout=30)
    leftover = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL and leftover.is_dir()
    with CpuQuota("test", 0.5) as quota:
        assert not leftover.exists() and quota.path.is_dir()
        CpuQuota("another", 0.5).remove()
        assert quota.path.is_dir()  # its creator is alive
        assert quota.path.name.startswith(f"{PREFIX}{os.getpid()}-")


def test_impossible_quotas_are_refused() -> None:
    assert quota_microseconds(0.3, 0.02) == (6_000, 20_000)
    with pytest.raises(ValueError, match="expected at least 0.001 s in each"):
        quota_microseconds(0.04, 0.02)
    with pytest.raises(ValueError, match="found a period of 2 s"):
        quota_microseconds(0.5, 2)
    with pytest.raises(ValueError, match="expected at least 0.001 s"):
        CpuQuota("test", -1.0)


def test_both_versions_are_found_and_written(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"cgroup {tmp_path} cgroup rw,memory 0 0\ncgroup {tmp_path} cgroup rw,cpu,cpuacct 0 0\n")
    first = CpuHierarchy.find(mounts)
    assert first == CpuHierarchy(tmp_path, 1)
    first.limit(tmp_path, 0.3, 0.1)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == "30000"
    assert (tmp_path / "cpu.cfs_period_us").read_text() == "100000"

    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert CpuHierarchy.find(mounts) is None  # mounted, but without the cpu controller
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    second = CpuHierarchy.find(mounts)
    assert second == CpuHierarchy(tmp_path, 2)
    second.limit(tmp_path, 1.5, 0.1)
    assert (tmp_path / "cpu.max").read_text() == "150000 100000"
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    second.let_groups_be_limited()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
