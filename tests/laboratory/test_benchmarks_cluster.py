# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The emulated cluster: its processes do what they are told and never outlive the driver; all phases run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import uneven_cluster  # noqa: E402
from limits import Limit  # noqa: E402

from accelerate_lshdp.benchmarking.rank_processes import RankError, RankProcesses  # noqa: E402
from accelerate_lshdp.emulated_cluster.cgroups import ControlGroup  # noqa: E402


SERVED = """
import os, time
from accelerate_lshdp.benchmarking.rank_processes import serve

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


@pytest.mark.parametrize("stops", ["", "with ranks.awake(): pass\n"])
def test_ranks_end_with_a_driver_that_is_killed(script: Path, stops: str) -> None:
    """In the middle of a call, and while they are stopped."""
    code = "from pathlib import Path\n"
    code += "from accelerate_lshdp.benchmarking.rank_processes import RankProcesses\n"
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


def test_a_limit_holds_up_to_its_value() -> None:
    assert Limit("x", 0.05, 0.05).holds and not Limit("x", 0.051, 0.05).holds
    assert not Limit("x", float("nan"), 0.05).holds


def test_options_that_cannot_work_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--phases", "profile,planes"], "found phases ['planes']"),
        (["--halved-rank", "4"], "expected one of 4 ranks"),
        (["--phases", "plans"], "run the phase profile first"),
    ):
        with pytest.raises(SystemExit):
            uneven_cluster.parse(["--output-dir", str(tmp_path), *options])
        assert message in capsys.readouterr().err


SMOKE = "--small --shares 0.8,0.4 --totals 8,64 --total 8 --profile-seconds 5 --plan-blocks 2 --steps 6 --blocks 1"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_quota", [True, False])
def test_all_phases_run_on_a_tiny_model(by_quota: bool, tmp_path: Path) -> None:
    refusal = ControlGroup.missing() if by_quota else None
    if refusal is not None:
        pytest.skip(f"no CPU quotas here: {refusal}")
    command = [sys.executable, str(BENCHMARKS / "uneven_cluster.py"), *SMOKE.split(), "--output-dir", str(tmp_path)]
    command += [] if by_quota else ["--no-quotas"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=250, env=dict(os.environ))
    # So short a run on a busy machine breaks limits of time (1), but every phase has to come to its end (not 2).
    assert finished.returncode in (0, 1), finished.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failure"] is None and len(results["limits"]) == 6
    assert ("CPU quotas (cgroups)" if by_quota else "EMULATED by sleeping") in finished.stdout
    assert [sum(size * count for size, count in row["micro_batches"]) for row in results["plans"]] == [8, 64]
    automatic = results["automatic"]
    assert [situation["shares"] for situation in automatic["situations"]] == [[0.8, 0.4], [0.4, 0.4]]
    assert automatic["steps"] == 2 * (6 + 1 + 4)
    assert automatic["situations"][0]["learning"][0]["batch_sizes"] == [4, 4]
    assert automatic["parameter_difference"] <= 5e-6
    assert (automatic["parameter_difference"] == 0) == (automatic["decisions"] == [])
