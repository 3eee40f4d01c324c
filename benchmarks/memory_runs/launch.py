# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Starts the ranks of a training whose memory is measured, in a memory control group for each node."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laboratory.emulated_cluster.cgroups import ControlGroup

from accelerate_lshdp.runtime.free_port import free_port


#: Of a core, for each group: memory is measured here, not speed.
_AMPLE_CORES = 64.0
_AMPLE_BYTES = 2**40


@dataclass(frozen=True)
class NodeRun:
    """The bytes that the ranks of a node took.

    Args:
        base: bytes of their processes before the model.
        peak: the most bytes above `base`.
    """

    base: int
    peak: int


class Killed(Exception):
    """The kernel has ended a rank of a node that exceeded its limit.

    Args:
        job: index of the job that was trained.
    """

    def __init__(self, job: int) -> None:
        super().__init__(f"the kernel has ended a rank in job {job}: its node took more than its limit")
        self.job = job


def train(jobs: Sequence[dict[str, Any]], nodes: Sequence[int]) -> list[list[NodeRun]]:
    """Trains some jobs one after the other, in processes of their own; returns what each node took, job by job.

    Args:
        jobs: `plan`, `model` and `steps` each, as JSON values; and `allowed`, the bytes that each node may take above
            its base, or None.
        nodes: ranks on each node.

    Raises:
        Killed: a node took more than it was allowed.
        RuntimeError: a rank failed; it says how.
    """
    places = [(node, local) for node, ranks in enumerate(nodes) for local in range(ranks)]
    port = free_port()
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(ControlGroup(f"memory{node}", _AMPLE_CORES, memory_bytes=_AMPLE_BYTES)).paths[-1]
            for node in range(len(nodes))
        ]
        ranks, outputs = [], []
        for rank, (node, local) in enumerate(places):
            outputs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            process = subprocess.Popen(
                # The shell joins the group before Python starts, so that nothing of it is counted elsewhere.
                [
                    "/bin/sh",
                    "-c",
                    f'echo $$ > "{groups[node]}/cgroup.procs" && exec "$0" "$@"',
                    sys.executable,
                    "-m",
                    "memory_runs.rank",
                    json.dumps(list(jobs)),
                    str(groups[node]),
                ],
                env=_environment(rank, local, node, nodes, port),
                stdout=subprocess.PIPE,
                stderr=outputs[-1],
                text=True,
            )
            stack.callback(_end, process)
            ranks.append(process)
        printed = _wait(ranks, groups)
        failed = [rank for rank, process in enumerate(ranks) if process.returncode]
        if failed:
            outputs[failed[0]].seek(0)
            raise RuntimeError(f"rank {failed[0]} failed: {outputs[failed[0]].read()[-2000:]}")
    firsts = [sum(nodes[:node]) for node in range(len(nodes))]
    by_node = [[NodeRun(**json.loads(line)) for line in printed[first].splitlines()] for first in firsts]
    return [list(runs) for runs in zip(*by_node, strict=True)]


def _wait(ranks: Sequence[subprocess.Popen], groups: Sequence[Path]) -> list[str]:
    """What each rank printed; a rank that the kernel ended ends the others, which would wait for it."""
    printed = [""] * len(ranks)
    waiting = dict(enumerate(ranks))
    while waiting:
        for rank in list(waiting):
            with contextlib.suppress(subprocess.TimeoutExpired):
                printed[rank] = waiting[rank].communicate(timeout=0.2)[0]
                del waiting[rank]
        if any(map(_kills, groups)):
            # What a rank has printed was trained; the job after it was not.
            outputs = [printed[rank] or _drained(process) for rank, process in enumerate(ranks)]
            raise Killed(min(len(text.splitlines()) for text in outputs))
        if any(process.returncode for process in ranks):
            break
    return printed


def _kills(group: Path) -> int:
    """How many processes of a group the kernel has ended because the group was full."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _drained(process: subprocess.Popen) -> str:
    process.kill()
    return process.communicate()[0]


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def _environment(rank: int, local: int, node: int, nodes: Sequence[int], port: int) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LSDP_"))},
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(sum(nodes)),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(nodes[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
