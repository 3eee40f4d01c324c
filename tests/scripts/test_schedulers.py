# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The templates for schedulers start a training on all nodes, with the variables and programs that these have."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import yaml
from endless_trainer import TRAINER
from launching import LOOPBACK, base_environment, free_port


TEMPLATES = Path(__file__).parents[2] / "accelerate_configs" / "schedulers"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the templates are for Linux")

TRAIN = """
import os, sys
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
sys.stdout.write(f"rank {accelerator.process_index} of {accelerator.num_processes}, {sys.argv[1:]}\\n")
"""
# `srun` of two nodes of one task: both run here, signals go to both, and the first failure ends the other one.
SRUN = """\
#!{python}
import os, signal, subprocess, sys
command = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
tasks = [subprocess.Popen(command, env=dict(os.environ, SLURM_PROCID=str(task))) for task in range(2)]
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(codes))
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """As a scheduler's job has it; programs of ``folder/bin`` come first."""
    made = base_environment()
    path = os.pathsep.join([str(folder / "bin"), sysconfig.get_path("scripts"), made.get("PATH", "")])
    return {**made, "PATH": path, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", **more}


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def slurm_script(folder: Path) -> Path:
    """The template, with a port of its own, beside programs in the place of SLURM's."""
    write_program(folder / "bin" / "srun", SRUN.format(python=sys.executable))
    names = '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames job" ] && printf "127.0.0.1\\n127.0.0.1\\n"\n'
    write_program(folder / "bin" / "scontrol", names)
    text = (TEMPLATES / "slurm.sh").read_text()
    assert text.count(" --auto ") == 1
    script = folder / "slurm.sh"
    script.write_text(text.replace(" --auto ", f" --main-port {free_port()} --auto "))
    return script


def test_slurm_starts_a_launcher_on_each_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    script = slurm_script(tmp_path)
    done = subprocess.run(
        ["bash", str(script), "train.py", "--epochs", "3"],
        cwd=tmp_path,
        env=environment(tmp_path, SLURM_JOB_NODELIST="job"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2, ['--epochs', '3']" in done.stdout, done.stdout + done.stderr


def test_slurm_saves_when_the_time_is_nearly_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    script = slurm_script(tmp_path)
    output = tmp_path / "output"
    with output.open("w") as file:
        job = subprocess.Popen(
            ["bash", str(script), "train.py"],
            cwd=tmp_path,
            env=environment(tmp_path, SLURM_JOB_NODELIST="job"),
            stdout=file,
            stderr=file,
        )
    deadline = time.monotonic() + 90
    while "'loss'" not in output.read_text() and time.monotonic() < deadline:
        assert job.poll() is None, output.read_text()
        time.sleep(0.2)
    # To the steps of the job, and not to its shell, as SLURM sends it.
    [srun] = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(job.pid)], text=True).split()]
    os.kill(srun, signal.SIGUSR1)
    assert job.wait(60) == 0, output.read_text()
    saved = [sorted(path.name for path in (tmp_path / f"out{node}").iterdir()) for node in range(2)]
    assert len(saved[0]) == 1 and saved[0] == saved[1] and saved[0][0].startswith("checkpoint-"), saved


def test_skypilot_starts_a_launcher_on_each_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    task = yaml.safe_load((TEMPLATES / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and task["run"].count(" --auto ") == 1
    script = "set -e\n" + task["run"].replace(" --auto ", f" --main-port {free_port()} --auto ")
    nodes = [
        subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment(
                tmp_path,
                SKYPILOT_NODE_RANK=str(node),
                SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
                SKYPILOT_NUM_NODES="2",
                SKYPILOT_NUM_GPUS_PER_NODE="1",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=110)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert all(f"rank {node} of 2" in outputs[node] for node in range(2)), outputs


RAY_CLUSTER = """
import runpy, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1}})
cluster.add_node(num_cpus=1)
import os
os.environ["RAY_ADDRESS"] = cluster.address
sys.argv = ["ray_launch.py", "--ranks", "1,1", "train.py", "--epochs", "3"]
sys.path.insert(0, {folder!r})
import ray_launch
ray_launch.PORT = {port}
sys.exit(ray_launch.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_starts_a_launcher_on_each_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    script = RAY_CLUSTER.format(folder=str(TEMPLATES), port=free_port())
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for rank in range(2):
        assert f"rank {rank} of 2, ['--epochs', '3']" in done.stdout + done.stderr, done.stdout + done.stderr
