# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Launchers pass signals on to their ranks and wait for them; a failure waits for nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from endless_trainer import TRAINER
from launching import LOOPBACK, base_environment, free_port


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")


def start_launchers(folder: Path, nodes: str, script: str) -> list[subprocess.Popen]:
    (folder / "train.py").write_text(script)
    count, port = len(nodes.split(",")), free_port()
    place = ["--main-ip", "127.0.0.1", "--main-port", str(port)] if count > 1 else []
    environment = {**base_environment(), "GLOO_SOCKET_IFNAME": LOOPBACK}
    started = []
    for node in range(count):
        command = [sys.executable, "-m", "accelerate_lshdp.cli.main", "launch", "--nodes", nodes, "--cpu", *place]
        command += ["--node-rank", str(node)] if count > 1 else []
        with (folder / f"output{node}").open("w") as file:
            started.append(
                subprocess.Popen([*command, "train.py"], cwd=folder, env=environment, stdout=file, stderr=file)
            )
    return started


def wait_for(words: str, folder: Path, launchers: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 90
    while words not in (folder / "output0").read_text() and time.monotonic() < deadline:
        assert [launcher.poll() for launcher in launchers] == [None] * len(launchers), outputs(folder)
        time.sleep(0.1)


def outputs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("output*")))


@pytest.mark.parametrize(("nodes", "told"), [("1", 0), ("1,1", 1), ("1,1", 0)])
def test_a_launcher_that_is_told_to_end_waits_for_all_to_save(tmp_path: Path, nodes: str, told: int) -> None:
    launchers = start_launchers(tmp_path, nodes, TRAINER)
    try:
        wait_for("'loss'", tmp_path, launchers)
        launchers[told].send_signal(signal.SIGTERM)
        assert [launcher.wait(60) for launcher in launchers] == [0] * len(launchers), outputs(tmp_path)
    finally:
        for launcher in launchers:
            launcher.kill()
    assert outputs(tmp_path).count("training has ended") == len(launchers)
    saved = [sorted(path.name for path in (tmp_path / f"out{node}").iterdir()) for node in range(len(launchers))]
    assert len(saved[0]) == 1 and all(names == saved[0] for names in saved), saved


def test_a_launcher_that_waits_for_others_ends_at_once(tmp_path: Path) -> None:
    [launcher, other] = start_launchers(tmp_path, "1,1", TRAINER)
    other.kill()
    try:
        wait_for("running train.py", tmp_path, [launcher])
        time.sleep(2)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(10) == 128 + signal.SIGTERM, outputs(tmp_path)
    finally:
        launcher.kill()


def test_ranks_that_know_nothing_of_signals_end_by_them(tmp_path: Path) -> None:
    [launcher] = start_launchers(tmp_path, "2", "import time; print('begun', flush=True); time.sleep(100)")
    try:
        wait_for("begun", tmp_path, [launcher])
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 128 + signal.SIGTERM, outputs(tmp_path)
    finally:
        launcher.kill()


FAILING = TRAINER.replace(
    "Trainer(model, args, train_dataset=rows).train()",
    """
from transformers import TrainerCallback
import time
class Fail(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            if os.environ["RANK"] == "1":
                print("fails", flush=True)
                raise ValueError("planted")
            time.sleep(100)
Trainer(callbacks=[Fail()], model=model, args=args, train_dataset=rows).train()
""",
)


def test_a_failure_does_not_wait_for_ranks_that_note_signals(tmp_path: Path) -> None:
    """torch's launcher ends the others by SIGTERM, too; it would wait half a minute for a rank that sleeps on."""
    [launcher] = start_launchers(tmp_path, "2", FAILING)
    try:
        while "fails" not in outputs(tmp_path) and launcher.poll() is None:
            time.sleep(0.1)
        began = time.monotonic()
        assert launcher.wait(60) == 1, outputs(tmp_path)
        assert time.monotonic() - began < 25, outputs(tmp_path)
    finally:
        launcher.kill()


LEAVING = """
import os, sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
if os.environ["RANK"] == "1":
    print("leaves", flush=True)
    sys.exit(7)
while True:
    accelerator.reduce(torch.ones(1))
"""


def test_a_rank_that_loses_another_says_so_with_its_code(tmp_path: Path) -> None:
    launchers = start_launchers(tmp_path, "1,1", LEAVING)
    try:
        assert [launcher.wait(90) for launcher in launchers] == [76, 7], outputs(tmp_path)
    finally:
        for launcher in launchers:
            launcher.kill()
    assert "The output of the rank that ended first says why" in outputs(tmp_path)
    assert outputs(tmp_path).count("SystemExit") == 0
