# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A launcher that is killed: its ranks end with it, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from launching import ACCELERATE_CONFIG, apply_environment, base_environment, free_port, has_ended

from accelerate_lshdp import Plan
from accelerate_lshdp.runtime import parent_death as ending


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them on Linux only")

START_SECONDS, END_SECONDS = 80.0, 10.0
# Ranks that would go on: one that waits for nothing, and one that is in the middle of a collective.
_SLEEPING = """\
import os, time
open(f"rank-{os.environ.get('LOCAL_RANK', '0')}", "x").close()
time.sleep(600)
"""
_COLLECTIVE = """\
import os, time
import torch.distributed as dist
from accelerate_lshdp import LSHDPAccelerator, Plan

accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"))
open(f"rank-{accelerator.process_index}", "x").close()
if accelerator.process_index == 0:
    time.sleep(600)
dist.barrier()
"""
_OURS = ["-m", "accelerate_lshdp.cli.main"]
_SHIM = ["-m", "accelerate_lshdp.run", "--plan", "plan.json"]
_STOCK = ["-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "--log_dir", os.devnull]
#: The launcher, its script and number of ranks.
LAUNCHES: dict[str, tuple[list[str], str, int]] = {
    "launch": ([*_OURS, "launch", "--plan", "plan.json", "--cpu"], _SLEEPING, 2),
    "shim under accelerate launch": ([*_STOCK, *_SHIM], _SLEEPING, 2),
    "launch of one rank": ([*_OURS, "launch", "--nodes", "1", "--cpu"], _SLEEPING, 1),
    "launch, in a collective": ([*_OURS, "launch", "--plan", "plan.json", "--cpu"], _COLLECTIVE, 2),
    "no shim, in a collective": (_STOCK, _COLLECTIVE, 2),
}
SLOW = list(LAUNCHES)[2:]


def start(arguments: Sequence[str], folder: Path) -> subprocess.Popen:
    """A launcher, whose temporary folders are in ``folder/tmp``."""
    (folder / "tmp").mkdir()
    environment = apply_environment(base_environment(), {"TMPDIR": str(folder / "tmp"), "ACCELERATE_USE_CPU": None})
    with open(folder / "output", "w") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill_when(launcher: subprocess.Popen, folder: Path, marks: Sequence[str]) -> list[int]:
    """Kills the launcher once its ranks have left their marks, and waits for their end; returns those that live."""
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + START_SECONDS
        while not all((folder / mark).exists() for mark in marks):
            assert launcher.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    try:
        assert len(ranks) >= len(marks)
        deadline = time.monotonic() + END_SECONDS
        while not all(has_ended(rank.pid) for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [rank.pid for rank in ranks if not has_ended(rank.pid)]
    finally:
        for rank in ranks:
            if not has_ended(rank.pid):
                rank.kill()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAUNCHES])
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, name: str) -> None:
    launcher, script, ranks = LAUNCHES[name]
    (tmp_path / "script.py").write_text(script)
    Plan.from_batch_sizes([2, 1], strategy="ddp").save(tmp_path / "plan.json")
    config = ACCELERATE_CONFIG.format(machine_rank=0, port=free_port(), machines=1, processes=2)
    (tmp_path / "accelerate.yaml").write_text(config)

    process = start([*launcher, "script.py"], tmp_path)

    assert kill_when(process, tmp_path, [f"rank-{rank}" for rank in range(ranks)]) == []
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.slow
def test_everything_ends_with_a_quickstart_that_is_killed(tmp_path: Path) -> None:
    process = start([*_OURS, "quickstart", "--output-dir", str(tmp_path / "results"), "--steps", "10000"], tmp_path)
    deadline = time.monotonic() + START_SECONDS
    while len(psutil.Process(process.pid).children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)  # the launcher and two ranks
    (tmp_path / "started").touch()
    assert kill_when(process, tmp_path, ["started"]) == []


# Starts a process that is told to end with it, and says its number.
_CHILD = """\
import os, sys, time
{set}
from accelerate_lshdp.runtime.parent_death import end_with
end_with({parent})
time.sleep(60)
"""
_PARENT = """\
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {child!r}]).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_process_ends_with_its_parent(platform: str) -> None:
    """Where the kernel does it, and where nobody does."""
    child = _CHILD.format(set=f"sys.platform = {platform!r}", parent="os.getppid()")
    code = _PARENT.format(child=child)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        started = psutil.Process(int(parent.stdout.readline()))
        try:
            time.sleep(0.5)
            assert not has_ended(started.pid)
            parent.kill()
            deadline = time.monotonic() + END_SECONDS
            while not has_ended(started.pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert has_ended(started.pid)
        finally:
            parent.kill()
            if not has_ended(started.pid):
                started.kill()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_process_ends_if_its_parent_has_ended_before(platform: str) -> None:
    code = _CHILD.format(set=f"sys.platform = {platform!r}", parent=1234567890)
    ended = subprocess.run([sys.executable, "-c", code], timeout=END_SECONDS, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_only_a_launcher_takes_its_children_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a rank has started inherits the launcher's variables, and may outlive the rank."""
    told: list[int] = []
    monkeypatch.setattr(ending, "end_with", told.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    ending.end_with_launcher()  # as if from a shell

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for started_with in ({"TORCHELASTIC_RUN_ID": "none"}, None):
        monkeypatch.setattr(ending, "environment_at_start", lambda pid, found=started_with: found)
        ending.end_with_launcher()  # from a rank, and from nobody knows what
    assert told == []

    monkeypatch.setattr(ending, "environment_at_start", lambda pid: {"PATH": "/bin"})
    ending.end_with_launcher()  # from torchrun
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv(ending.LAUNCHER_VARIABLE, str(os.getppid()))
    ending.end_with_launcher()  # from our launcher, of one rank
    assert told == [os.getppid()] * 2 and ending.LAUNCHER_VARIABLE not in os.environ


def test_rank_ends_if_the_launcher_was_killed_while_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(ending, "_end", lambda: ended.append(True))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv(ending.LAUNCHER_VARIABLE, str(os.getpid()))  # lives, and has a helper that is our parent
    ending.end_with_launcher()
    assert not ended
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
        for _ in range(2):  # as long as nobody has noted its end, and then
            monkeypatch.setenv(ending.LAUNCHER_VARIABLE, str(gone.pid))
            ending.end_with_launcher()
            gone.wait()
    assert len(ended) == 2
