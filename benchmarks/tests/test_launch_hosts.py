# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`launch --hosts` trains on emulated machines from one of them, and leaves no process and no file behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from emulated_machines import Machines, emulated_machines
from endless_trainer import TRAINER
from laboratory.emulated_cluster import EmulatedCluster
from laboratory.emulated_cluster.debian_tools import DebianTools
from launch_endings import ENDINGS, assert_nothing_is_left, files_of

from accelerate_lshdp.checkpoint.folder import search, verify


MISSING = EmulatedCluster.missing()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}"),
    pytest.mark.timeout(110),
]

COUNT = 2
# Sums of parameters after some steps, which all nodes print; `steps` and `fail_on` come as arguments.
TRAIN = """
import os, sys, time
import torch
from accelerate import Accelerator
from helper import make_model

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = torch.randn(64, 4)
model = make_model()
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
steps, fail_on = int(sys.argv[1]), int(sys.argv[2])
model.train()
done = 0
print("training begins", flush=True)
while done < steps:
    for batch in loader:
        if done == steps:
            break
        if done == 3 and accelerator.process_index == fail_on:
            sys.exit(7)
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        done += 1
        if steps > 100:
            time.sleep(0.05)
total = sum(float(p.detach().double().sum()) for p in model.parameters())
place = f"rank {accelerator.process_index} of {accelerator.num_processes}"
print(f"{place}: {total:.6f} {os.environ.get('NOTE')}", flush=True)
print("to errors", file=sys.stderr)
"""
HELPER = """
import torch
def make_model():
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3)
"""
MEASURED = """
import torch
from helper import make_model
from accelerate_lshdp.profiling import Subject

def profiling_subject(argv):
    model = make_model()
    loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Subject(model, loader, optimizer, lambda model, x: model(x).square().mean())
"""
COMPARED = """
models:
  vit: {kind: vit, image_size: 16, patch_size: 8, num_channels: 1, hidden_size: 128, num_hidden_layers: 2,
        num_attention_heads: 4, intermediate_size: 512, num_labels: 10}
total_batch_size: 6
strategies: [torch_ddp, lsdp]
rounds: 1
steps: 1
profile_seconds: 0
"""


@pytest.fixture
def machines(debian_tools: DebianTools, tmp_path: Path) -> Iterator[Machines]:
    with emulated_machines(COUNT, tmp_path, debian_tools) as made:
        for node in range(COUNT):
            (made.own_folder(node) / "train.py").write_text(TRAIN)
            (made.own_folder(node) / "helper.py").write_text(HELPER)
        yield made


def launch(machines: Machines, *arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    process = machines.start("launch", arguments)
    output, _ = process.communicate(timeout=90)
    return process.returncode, output


def results(output: str) -> list[str]:
    """What the ranks have printed at their end, by rank."""
    return [found[1] for found in sorted(re.findall(r"node \d \| rank (\d) of \d: (.*)", output))]


def test_all_machines_train_one_model(machines: Machines) -> None:
    (machines.own_folder(0) / "plan.json").write_text(
        json.dumps(
            {
                "version": 1,
                "strategy": "ddp",
                "batch": {
                    "total": 8,
                    "ranks": [
                        {"rank": rank, "micro_batch_size": size, "accumulation_steps": 1}
                        for rank, size in enumerate((5, 3))
                    ],
                },
            }
        )
    )
    before = files_of(machines)
    code, output = launch(machines, "--plan", "plan.json", "--env", "NOTE=is told", "train.py", "8", "-1")
    assert code == 0, output
    totals = results(output)
    assert len(totals) == 2 and len(set(totals)) == 1 and totals[0].endswith("is told"), output
    assert re.search(r"^node 1 \| to errors$", output, re.MULTILINE), output
    assert_nothing_is_left(machines, before)


def test_what_one_machine_lacks_is_said_and_nothing_started(machines: Machines) -> None:
    (machines.own_folder(1) / "helper.py").write_text("def make_model(): raise SystemExit('another one')\n")
    code, output = launch(machines, "--auto", "train.py", "8", "-1")
    assert code == 1 and "found another one than here: helper.py" in output and "nothing was started" in output, output
    assert "training begins" not in output
    code, output = launch(machines, "--auto", "--copy", "train.py", "8", "-1")
    assert code == 0 and "copied 1 file to node 1" in output and len(set(results(output))) == 1, output


def test_the_first_failure_ends_all_with_its_code(machines: Machines) -> None:
    before = files_of(machines)
    code, output = launch(machines, "--auto", "train.py", "1000", "1")
    assert code == 7 and "node 1 ended with code 7" in output, output
    assert_nothing_is_left(machines, before)


def test_a_machine_that_is_the_wrong_one_is_said(machines: Machines) -> None:
    (machines.ssh.folder(1) / "authorized_keys").write_text("")
    code, output = launch(machines, "--auto", "train.py", "8", "-1")
    assert code == 1 and "Permission denied" in output and "ssh-copy-id" in output, output


def test_a_profile_comes_from_a_machine_that_is_elsewhere(machines: Machines) -> None:
    """The first node of the file is another machine than the one on which the command runs."""
    machines.hosts.reverse()
    for node in range(COUNT):
        (machines.own_folder(node) / "measured.py").write_text(MEASURED)
    arguments = ["--seconds", "4", "--strategy", "ddp", "--max-batch", "4", "measured.py"]
    process = machines.start("profile", arguments)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    profile = json.loads((machines.own_folder(0) / "lshdp_profile.json").read_text())
    assert len(profile["ranks"]) == COUNT, output
    assert profile == json.loads((machines.own_folder(1) / "lshdp_profile.json").read_text())


@pytest.mark.slow
def test_strategies_are_compared_on_all_machines(machines: Machines) -> None:
    machines.hosts.reverse()
    (machines.own_folder(0) / "compare.yaml").write_text(COMPARED)
    process = machines.start("bench", ["compare.yaml", "--copy", "--output-dir", "outputs/compared"])
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    results = json.loads((machines.own_folder(0) / "outputs/compared/results.json").read_text())
    assert {case["strategy"] for case in results["cases"]} >= {"torch_ddp", "lsdp"}, output


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_lets_all_machines_save_the_same_step(machines: Machines, number: int) -> None:
    for node in range(COUNT):
        (machines.own_folder(node) / "trainer.py").write_text(TRAINER)
    process = machines.start("launch", ["--auto", "trainer.py"])
    for line in process.stdout:
        if "'loss'" in line:
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    # A launcher that is told to end says so; its ranks have ended well.
    assert process.returncode == (0 if number == signal.SIGUSR1 else 128 + number), output
    assert output.count("training has ended") == COUNT, output
    outputs = [machines.own_folder(node) / f"out{node}" for node in range(COUNT)]
    names = [sorted(path.name for path in folder.iterdir()) for folder in outputs]
    assert len(names[0]) == 1 and names[0] == names[1] and names[0][0].startswith("checkpoint-"), names
    folders = [search(folder / names[0][0]) for folder in outputs]
    assert all(len(found) == 1 and verify(found[0].path, found[0].manifest) is None for found in folders), folders


def test_a_pulled_cable_is_noticed_and_ends_the_run(machines: Machines) -> None:
    process = machines.start("launch", ["--auto", "--lost-after", "5", "train.py", "100000", "-1"])
    for line in process.stdout:
        if "training begins" in line:
            break
    time.sleep(4)  # launchers have met
    machines.cluster.cut_link(1)
    cut_at, lines = time.monotonic(), []
    for line in process.stdout:
        lines.append((time.monotonic() - cut_at, line))
        if "has been silent for" in line:
            break
    noticed = [seconds for seconds, line in lines if re.search(r"node 0 \| .*node 1 .* has not been heard of", line)]
    assert len(noticed) == 1 and noticed[0] < 4, lines  # two seconds, on a busy machine
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 137, output
    machines.cluster.restore_link(1)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_nothing_is_left_however_a_training_ends(
    machines: Machines, ending: Callable[[Machines, subprocess.Popen], None]
) -> None:
    before = files_of(machines)
    process = machines.start("launch", ["--auto", "train.py", "100000", "-1"])
    for line in process.stdout:
        if "training begins" in line:
            break
    ending(machines, process)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in ENDINGS[ending], output
    assert_nothing_is_left(machines, before)
