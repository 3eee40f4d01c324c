# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Launchers of several nodes notice one that is frozen, and end when it stays so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import LOOPBACK, base_environment, free_port


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are frozen by signals of Linux")

TRAIN = """
import sys, time
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
model.train()
print("training begins", flush=True)
began = time.monotonic()
# Ended by what all ranks agree on alone: their clocks may say different things between two passes.
while True:
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        done = torch.tensor(float(time.monotonic() - began > float(sys.argv[1])))
        if accelerator.reduce(done) > 0:
            time.sleep(8 if accelerator.is_main_process and sys.argv[1] == "2" else 0)
            sys.exit(0)
        time.sleep(0.02)
"""
COUNT = 3


def start(folder: Path, seconds: float, *options: str) -> list[subprocess.Popen]:
    (folder / "train.py").write_text(TRAIN)
    place = ["--nodes", "1,1,1", "--cpu", "--main-ip", "127.0.0.1", "--main-port", str(free_port()), *options]
    environment = {**base_environment(), "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    started = []
    for node in range(COUNT):
        command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", *place, "--node-rank", str(node)]
        with (folder / f"output{node}").open("w") as file:
            started.append(
                subprocess.Popen(
                    [*command, "train.py", str(seconds)], cwd=folder, env=environment, stdout=file, stderr=file
                )
            )
    deadline = time.monotonic() + 90
    while not all("training begins" in output(folder, node) for node in range(COUNT)):
        assert time.monotonic() < deadline and not any(each.poll() for each in started), outputs(folder)
        time.sleep(0.1)
    time.sleep(3)  # launchers have met
    return started


def output(folder: Path, node: int) -> str:
    return (folder / f"output{node}").read_text()


def outputs(folder: Path) -> str:
    return "\n".join(output(folder, node) for node in range(COUNT))


def send_to_all_of(launcher: subprocess.Popen, number: int) -> None:
    """To a launcher and its ranks, as if the machine stood still."""
    process = psutil.Process(launcher.pid)
    for each in [process, *process.children(recursive=True)]:
        each.send_signal(number)


@pytest.fixture
def launched(tmp_path: Path):
    started: list[subprocess.Popen] = []
    yield started
    for launcher in started:
        if launcher.poll() is None:
            send_to_all_of(launcher, signal.SIGKILL)
            launcher.wait()


def test_a_frozen_node_is_noticed_and_so_is_its_return(tmp_path: Path, launched: list[subprocess.Popen]) -> None:
    launched += start(tmp_path, 12)
    send_to_all_of(launched[1], signal.SIGSTOP)
    time.sleep(4)
    send_to_all_of(launched[1], signal.SIGCONT)
    assert [launcher.wait(60) for launcher in launched] == [0] * COUNT, outputs(tmp_path)
    for node in (0, 2):
        text = output(tmp_path, node)
        assert re.search(r"node 1 \(127\.0\.0\.1\) has not been heard of since \d\d:\d\d:\d\d \(", text), text
        assert re.search(r"node 1 \(127\.0\.0\.1\) is back, after [\d.]+ s", text), text
    assert "has not been heard of" not in output(tmp_path, 1), outputs(tmp_path)


def test_a_run_ends_when_a_node_stays_away(tmp_path: Path, launched: list[subprocess.Popen]) -> None:
    launched += start(tmp_path, 300, "--lost-after", "4")
    send_to_all_of(launched[2], signal.SIGSTOP)
    assert [launcher.wait(60) for launcher in launched[:2]] == [137, 137], outputs(tmp_path)
    assert "node 2 has been silent for " in output(tmp_path, 0), outputs(tmp_path)


def test_a_node_whose_ranks_have_ended_may_go(tmp_path: Path, launched: list[subprocess.Popen]) -> None:
    """Its launcher waits for the others, and is taken away with its machine meanwhile."""
    launched += start(tmp_path, 2, "--lost-after", "3", "--notice-after", "2")
    # Rank 0 has something to do when all have trained.
    deadline = time.monotonic() + 60
    while psutil.Process(launched[2].pid).children() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)  # it has said so
    launched[2].kill()
    launched[2].wait()
    assert launched[0].wait(60) == 0, outputs(tmp_path)
    assert "heard of" not in output(tmp_path, 0), outputs(tmp_path)


def test_a_run_that_ends_well_misses_nobody(tmp_path: Path, launched: list[subprocess.Popen]) -> None:
    launched += start(tmp_path, 5)
    assert [launcher.wait(60) for launcher in launched] == [0] * COUNT, outputs(tmp_path)
    assert "heard of" not in outputs(tmp_path) and "silent" not in outputs(tmp_path)
    assert "do not tell each other" not in outputs(tmp_path), outputs(tmp_path)
