# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A node that is killed, cut off or slow in mid-run: the others say so in time, in words for users; nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cluster_remains import named_shared_memory, remains
from laboratory.emulated_cluster import (
    Cluster,
    EmulatedCluster,
    Link,
    Node,
)
from launching import apply_environment, base_environment, rank_environment


MISSING = EmulatedCluster.missing()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(MISSING is not None, reason=f"no emulated cluster here: {MISSING}"),
    pytest.mark.timeout(110),
]

WORKER = Path(__file__).with_name("cluster_fault_worker.py")
# Seconds; the ranks have to find each other within it, too, on a busy machine.
TIMEOUT = 8
# Until a rank that has got its error has ended: printing it and leaving Python, on a busy machine.
EXIT_SECONDS = 25.0
LOST, LATE = "CommunicationError: the connection to another rank was lost", "CommunicationError: another rank did not"


@dataclass
class Rank:
    node: int
    process: subprocess.Popen
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    def steps(self) -> int:
        return self.output().count("ends at")

    def failed_at(self) -> float:
        """Wall time."""
        return float(self.output().partition("failed at ")[2].split()[0])


class Training:
    """Ranks that train for a long time on the nodes of a cluster."""

    def __init__(self, folder: Path, ranks_per_node: int, strategy: str, communication: str = "fp32") -> None:
        self.cluster = EmulatedCluster(Cluster((Node(1, cores=1.0),) * 2, Link(1e9)))
        self.ranks: list[Rank] = []
        self._folder, self._ranks_per_node = folder, ranks_per_node
        self._arguments = [strategy, communication, str(TIMEOUT), "5000"]

    def __enter__(self) -> Training:
        self.cluster.__enter__()
        try:
            for rank in range(2 * self._ranks_per_node):
                self._start(rank)
            self.wait_for_steps(3, 60)
        except BaseException:
            self.cluster.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.close()

    def _start(self, rank: int) -> None:
        nodes = [self._ranks_per_node] * 2
        environment = {**base_environment(), **rank_environment(rank, nodes, port=29400)}
        changes = {"MASTER_ADDR": self.cluster.nodes[0].address, "GLOO_SOCKET_IFNAME": self.cluster.nodes[0].interface}
        node, log = rank // self._ranks_per_node, self._folder / f"rank-{rank}.log"
        with log.open("w") as output:
            process = self.cluster.popen(
                node,
                [sys.executable, WORKER, *self._arguments],
                env=apply_environment(environment, changes),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.ranks.append(Rank(node, process, log))

    def wait_for_steps(self, count: int, seconds: float) -> None:
        """Until every rank has made so many."""
        deadline = time.monotonic() + seconds
        while min(rank.steps() for rank in self.ranks) < count:
            ended = [rank.output() for rank in self.ranks if rank.process.poll() is not None]
            assert not ended and time.monotonic() < deadline, "\n".join(ended) or "too few steps"
            time.sleep(0.05)

    def survivors_fail(self, node: int | None, within: float) -> list[str]:
        """What the ranks print that are not on a killed node; they have to get their errors and end in time."""
        disturbed = time.time()
        survivors = [rank for rank in self.ranks if rank.node != node]
        for rank in survivors:
            code = rank.process.wait(timeout=max(0.1, disturbed + within + EXIT_SECONDS - time.time()))
            assert code == 1, rank.output()
            assert rank.failed_at() - disturbed < within, rank.output()
        return [rank.output() for rank in survivors]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert remains(os.getpid()) == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children


@pytest.mark.slow
def test_a_killed_node(tmp_path: Path) -> None:
    with Training(tmp_path, 1, "lsdp") as training:
        training.cluster.kill_node(0)  # which has the store, too
        (output,) = training.survivors_fail(0, within=TIMEOUT)
        assert LOST in output and "The output of the rank that ended first says why" in output


@pytest.mark.slow
def test_a_slow_link_and_then_a_cut_one(tmp_path: Path) -> None:
    with Training(tmp_path, 1, "ddp") as training:
        training.cluster.set_network(Link(10e6), node=1)
        before, started = training.cluster.traffic()[1].sent_bytes, time.monotonic()
        training.wait_for_steps(training.ranks[0].steps() + 5, 30)
        sent = training.cluster.traffic()[1].sent_bytes - before
        # Five steps of 264 kB and more, at the slow rate: nobody gives up.
        assert 5 * 264e3 < sent < 10e6 / 8 * (time.monotonic() - started) + 400e3
        training.cluster.cut_link(1)
        for output in training.survivors_fail(None, within=TIMEOUT + 3):
            assert LATE in output and "InitProcessGroupKwargs(timeout=" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "communication", "ranks_per_node"),
    [("fsdp", "fp32", 1), ("fsdp", "fp32", 2), ("lsdp", "fp32", 2), ("lsdp", "int8", 2), ("ddp", "powersgd", 2)],
)
@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_other_strategies(tmp_path: Path, strategy: str, communication: str, ranks_per_node: int, fault: str) -> None:
    with Training(tmp_path, ranks_per_node, strategy, communication) as training:
        pids = [rank.process.pid for rank in training.ranks]
        if fault == "kill":
            training.cluster.kill_node(1)
            outputs = training.survivors_fail(1, within=TIMEOUT)
            expected = LOST
        else:
            training.cluster.cut_link(1)
            outputs = training.survivors_fail(None, within=TIMEOUT + 3)
            expected = LATE
        assert any(expected in output for output in outputs), outputs
        for output in outputs:
            # A rank may notice first that a rank of its own node has ended, and says so.
            assert "CommunicationError" in output or "NodeMemoryError" in output, output
        assert named_shared_memory(pids) == []
