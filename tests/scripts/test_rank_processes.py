# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The ranks' processes of a comparison do what they are told, and never outlive the driver."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from accelerate_lshdp.comparing import rank_processes
from accelerate_lshdp.comparing.rank_processes import RankError, RankProcesses


SERVED = """
import os, time
from accelerate_lshdp.comparing.rank_processes import serve

class Target:
    def add(self, value):
        return value + int(os.environ["RANK"])

    def fail(self, rank):
        if rank == int(os.environ["RANK"]):
            raise ValueError("of this rank")

    def leave(self):
        print("last words", flush=True)
        os._exit(3)

    def sleep(self):
        time.sleep(60)

serve(Target())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "served.py"
    path.write_text(SERVED)
    return path


def test_ranks_answer_in_order_and_are_ended(script: Path) -> None:
    with RankProcesses.on_loopback(script, 3) as ranks:
        assert ranks.call("add", timeout=30, value=5) == [5, 6, 7]
        pids = ranks.pids
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("fail", {"rank": 1}, "rank 1 raised in fail:\n.*of this rank"),
        ("leave", {}, "rank . ended during leave\n.*last words"),
        ("sleep", {}, "rank 0 had not finished sleep after 0.5 s"),
    ],
)
def test_what_went_wrong_is_said(script: Path, method: str, arguments: dict, message: str) -> None:
    with RankProcesses.on_loopback(script, 2) as ranks:
        ranks.call("add", timeout=30, value=0)
        with pytest.raises(RankError, match=f"(?s){message}"):
            ranks.call(method, timeout=0.5 if method == "sleep" else 30, **arguments)


def test_ranks_that_all_answered_can_go_on_after_an_error(script: Path) -> None:
    with RankProcesses.on_loopback(script, 2) as ranks:
        with pytest.raises(RankError, match="rank 0 raised") as caught:
            ranks.call("fail", timeout=30, rank=0)
        assert caught.value.ranks_usable
        assert ranks.call("add", timeout=30, value=1) == [1, 2]
        with pytest.raises(RankError, match="ended during leave") as caught:
            ranks.call("leave", timeout=30)
        assert not caught.value.ranks_usable


def test_processes_that_are_not_awake_do_nothing(script: Path) -> None:
    with RankProcesses.on_loopback(script, 2) as ranks:
        with ranks.awake():
            ranks.call("add", timeout=30, value=0)
        wait_until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in ranks.pids))
        with pytest.raises(RankError, match="had not finished add after 1 s"):
            ranks.call("add", timeout=1, value=0)
        with ranks.awake():
            assert ranks.call("add", timeout=30, value=5) == [0, 1]  # of the call before, which they take up again
        pids = ranks.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_whose_call_has_failed_elsewhere_are_not_waited_for(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node tells that its ranks have failed: these have some time left to answer, not all of it."""
    monkeypatch.setattr(rank_processes, "FAILURE_GRACE", 0.5)
    here, there = socket.socketpair()
    with there, RankProcesses.on_loopback(script, 2) as ranks:
        watched = Connection(here.detach())
        ranks.call("add", timeout=30, value=0, elsewhere={watched: lambda: True})
        there.sendall(b"failed")
        told: list[float] = []
        with pytest.raises(RankError, match="rank 0 had not finished sleep"):
            ranks.call("sleep", timeout=55, elsewhere={watched: lambda: told.append(time.monotonic()) or True})
        assert len(told) == 1 and time.monotonic() - told[0] < 40
        watched.close()


@pytest.mark.parametrize("stops", ["", "with ranks.awake(): pass\n"])
def test_ranks_end_with_a_driver_that_is_killed(script: Path, stops: str) -> None:
    """In the middle of a call, and while they are stopped."""
    code = "from pathlib import Path\n"
    code += "from accelerate_lshdp.comparing.rank_processes import RankProcesses\n"
    code += f"ranks = RankProcesses.on_loopback(Path({str(script)!r}), 2)\n"
    code += f"ranks.call('add', timeout=30, value=0)\n{stops}print(*ranks.pids, flush=True)\n"
    code += "ranks.call('sleep', timeout=60)"
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        if stops:
            wait_until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert condition()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
