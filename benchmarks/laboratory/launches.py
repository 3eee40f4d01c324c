# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The ranks' processes on an emulated cluster, or without root on the loopback.

They import and build at full speed and meet the cluster's speeds and network only while something is measured.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate_lshdp.comparing.launch import CALL_SECONDS, ENGINE, Launch
from accelerate_lshdp.comparing.memory_meter import MemoryMeter, proportional_set_size
from accelerate_lshdp.comparing.rank_processes import RankPlace, RankProcesses, rank_environment
from accelerate_lshdp.runtime.free_port import free_port
from laboratory.emulated_cluster import Cluster, EmulatedCluster, Link, Node


FULL_SPEED = Link(10e9)
#: Inside a network namespace of its own, where nobody else listens.
_PORT = 29500
_COMMAND = (sys.executable, "-m", "laboratory.rank")
_BENCHMARKS = Path(__file__).resolve().parents[1]


class LaboratoryLaunch(Launch):
    """The processes of all ranks on this machine, whose speeds and network can be set.

    Args:
        nodes: of the cluster.
        threads: of every rank's computation.
        kinds: as in `Launch`.
    """

    def __init__(self, nodes: Sequence[Node], threads: int, kinds: Sequence[str] = (ENGINE,)) -> None:
        super().__init__([node.ranks for node in nodes], kinds)
        self.nodes = list(nodes)
        self.node_of_rank = [index for index, node in enumerate(nodes) for _ in range(node.ranks)]
        self.threads = threads
        self._ranks: dict[str, RankProcesses] = {}
        self._stack = ExitStack()

    #: Whether speeds are emulated by sleeping, which the ranks have to do themselves.
    sleeps = False

    def __enter__(self) -> LaboratoryLaunch:
        try:
            self._open(self._stack)
            for number, kind in enumerate(self.kinds):
                self._ranks[kind] = self._stack.enter_context(RankProcesses(_COMMAND, self._places(number)))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def call(self, method: str, *, kind: str = ENGINE, timeout: float = CALL_SECONDS, **arguments: Any) -> list[Any]:
        ranks = self._ranks[kind]
        with ranks.awake() if len(self._ranks) > 1 else nullcontext():
            return ranks.call(method, timeout=timeout, **arguments)

    @contextmanager
    def as_described(self, network: Link) -> Iterator[None]:
        """In the block the nodes have the speeds of their description, and this network."""
        self._shape(network, [node.cores for node in self.nodes])
        try:
            yield
        finally:
            self._shape(FULL_SPEED, None)

    def sent_inside_nodes(self) -> list[int] | None:
        counted = self.call("loopback_bytes", kind=self.kinds[0])  # all of a node's processes share its loopback
        return [counted[self.node_of_rank.index(node)] for node in range(len(self.nodes))]

    def _open(self, stack: ExitStack) -> None:  # noqa: B027 - not every launch has something to open
        """Makes what the processes run on; what has to be closed at the end goes to the stack."""

    @abstractmethod
    def _places(self, number: int) -> list[RankPlace]:
        """Where each rank of the kind with this number runs."""

    @abstractmethod
    def _shape(self, network: Link, cores: Sequence[float] | None) -> None:
        """Sets network and cores of each node; None: full speed."""

    def memory_meter(self) -> MemoryMeter:
        return MemoryMeter(self.memory_bytes)

    @abstractmethod
    def memory_bytes(self) -> list[int]:
        """The proportional set size of all processes of each node."""


class EmulatedLaunch(LaboratoryLaunch):
    """On an `EmulatedCluster`: needs root."""

    def _open(self, stack: ExitStack) -> None:
        description = Cluster(tuple(self.nodes), FULL_SPEED)
        self._cluster = stack.enter_context(EmulatedCluster(description))
        self._shape(FULL_SPEED, None)

    def _places(self, number: int) -> list[RankPlace]:
        places = []
        for rank, node in enumerate(self.node_of_rank):
            environment = _environment(
                rank,
                self.node_sizes,
                port=_PORT + number,
                address=self._cluster.nodes[0].address,
                interface=self._cluster.nodes[node].interface,
                threads=self.threads,
            )
            places.append(RankPlace(environment, partial(self._cluster.popen, node)))
        return places

    def _shape(self, network: Link, cores: Sequence[float] | None) -> None:
        self._cluster.set_network(network)
        for node in range(len(self.nodes)):
            self._cluster.set_cpu(node, os.cpu_count() or 1 if cores is None else cores[node])

    def sent_between_nodes(self) -> list[int] | None:
        return [traffic.sent_bytes for traffic in self._cluster.traffic()]

    def memory_bytes(self) -> list[int]:
        return [self._cluster.memory_bytes(node) for node in range(len(self.nodes))]


class LoopbackLaunch(LaboratoryLaunch):
    """All on this machine's loopback: ranks sleep to be slow, and the network is not emulated."""

    sleeps = True

    def _places(self, number: int) -> list[RankPlace]:
        port = free_port()
        ranks = range(len(self.node_of_rank))
        return [RankPlace(_environment(r, self.node_sizes, port=port, threads=self.threads)) for r in ranks]

    def _shape(self, network: Link, cores: Sequence[float] | None) -> None:
        factors = [1.0] * len(self.node_of_rank)
        if cores is not None:
            shares = [cores[node] / self.node_sizes[node] for node in self.node_of_rank]
            factors = [max(1.0, self.threads / share) for share in shares]
        for kind in self.kinds:
            self.call("set_slowdown", kind=kind, factors=factors)

    def sent_inside_nodes(self) -> list[int] | None:
        return None  # all nodes share one loopback

    def sent_between_nodes(self) -> list[int] | None:
        return None

    def memory_bytes(self) -> list[int]:
        sums = [0] * len(self.nodes)
        for ranks in self._ranks.values():
            for pid, node in zip(ranks.pids, self.node_of_rank, strict=True):
                sums[node] += proportional_set_size(pid)
        return sums


def make_launch(
    nodes: Sequence[Node], threads: int, in_process: bool, kinds: Sequence[str]
) -> AbstractContextManager[LaboratoryLaunch]:
    """The processes on an emulated cluster, or on the loopback."""
    return (LoopbackLaunch if in_process else EmulatedLaunch)(nodes, threads, kinds)


def _environment(rank: int, node_sizes: Sequence[int], **options: Any) -> dict[str, str]:
    """As `rank_environment`, in which the rank's process finds the laboratory."""
    environment = rank_environment(rank, node_sizes, **options)
    inherited = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([str(_BENCHMARKS), *([inherited] if inherited else [])])}
