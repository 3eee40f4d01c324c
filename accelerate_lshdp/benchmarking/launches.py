# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The ranks' processes on a cluster: an emulated one, or without root on the loopback.

They import and build at full speed and meet the cluster's speeds and network only while something is measured.

Plain PyTorch has processes of its own: this package binds its processes to cores and tunes their allocator, which the
scripts that it is compared with do not. And DDP has others than FSDP2, which leaves the allocator in a state in which
DDP is faster than alone, as its users start it.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from accelerate_lshdp.benchmarking.rank_processes import RankPlace, RankProcesses, free_port, rank_environment
from accelerate_lshdp.emulated_cluster import ClusterDescription, EmulatedCluster, NetworkDescription, NodeDescription


FULL_SPEED = NetworkDescription(10e9)
#: Inside a network namespace of its own, where nobody else listens.
_PORT = 29500
#: Whose processes: those that use the engine, and those of plain PyTorch.
ENGINE, PLAIN_DDP, PLAIN_FSDP2 = "engine", "plain DDP", "plain FSDP2"
_CALL_SECONDS = 60.0
_COMMAND = (sys.executable, "-m", "accelerate_lshdp.benchmarking.rank")


class Launch(ABC):
    """The processes of all ranks; a context manager that ends them.

    Args:
        nodes: of the cluster.
        threads: of every rank's computation.
        crews: each has a process for every rank.
    """

    def __init__(self, nodes: Sequence[NodeDescription], threads: int, crews: Sequence[str] = (ENGINE,)) -> None:
        self.nodes = list(nodes)
        self.node_sizes = [node.ranks for node in nodes]
        self.node_of_rank = [index for index, node in enumerate(nodes) for _ in range(node.ranks)]
        self.threads = threads
        self.crews = tuple(crews)
        self._ranks: dict[str, RankProcesses] = {}
        self._stack = ExitStack()

    #: Whether speeds are emulated by sleeping, which the ranks have to do themselves.
    sleeps = False

    def __enter__(self) -> Launch:
        try:
            self._open(self._stack)
            for number, crew in enumerate(self.crews):
                self._ranks[crew] = self._stack.enter_context(RankProcesses(_COMMAND, self._places(number)))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def call(self, method: str, *, crew: str = ENGINE, timeout: float = _CALL_SECONDS, **arguments: Any) -> list[Any]:
        """What `rank.Rank`'s method returned in the processes of a crew, in rank order. Raises RankError.

        Where there is another crew, which might be measured next, these processes are stopped until the next call.
        """
        ranks = self._ranks[crew]
        with ranks.awake() if len(self._ranks) > 1 else nullcontext():
            return ranks.call(method, timeout=timeout, **arguments)

    @contextmanager
    def as_described(self, network: NetworkDescription) -> Iterator[None]:
        """In the block the nodes have the speeds of their description, and this network."""
        self._shape(network, [node.cpu for node in self.nodes])
        try:
            yield
        finally:
            self._shape(FULL_SPEED, None)

    def sent_inside_nodes(self) -> list[int] | None:
        """Bytes that went over each node's own loopback so far."""
        counted = self.call("loopback_bytes", crew=self.crews[0])  # all of a node's processes share its loopback
        return [counted[self.node_of_rank.index(node)] for node in range(len(self.nodes))]

    def _open(self, stack: ExitStack) -> None:  # noqa: B027 - not every launch has something to open
        """Makes what the processes run on; what has to be closed at the end goes to the stack."""

    @abstractmethod
    def _places(self, number: int) -> list[RankPlace]:
        """Where each rank of the crew with this number runs."""

    @abstractmethod
    def _shape(self, network: NetworkDescription, cores: Sequence[float] | None) -> None:
        """Sets network and cores of each node; None: full speed."""

    @abstractmethod
    def sent_between_nodes(self) -> list[int] | None:
        """Bytes that each node has sent to others so far; None where that is not known."""

    @abstractmethod
    def memory_bytes(self) -> list[int]:
        """The proportional set size of all processes of each node."""


class EmulatedLaunch(Launch):
    """On an `EmulatedCluster`: needs root."""

    def _open(self, stack: ExitStack) -> None:
        description = ClusterDescription(tuple(self.nodes), FULL_SPEED)
        self._cluster = stack.enter_context(EmulatedCluster(description))
        self._shape(FULL_SPEED, None)

    def _places(self, number: int) -> list[RankPlace]:
        places = []
        for rank, node in enumerate(self.node_of_rank):
            environment = rank_environment(
                rank,
                self.node_sizes,
                port=_PORT + number,
                address=self._cluster.nodes[0].address,
                interface=self._cluster.nodes[node].interface,
                threads=self.threads,
            )
            places.append(RankPlace(environment, partial(self._cluster.popen, node)))
        return places

    def _shape(self, network: NetworkDescription, cores: Sequence[float] | None) -> None:
        self._cluster.set_network(network)
        for node in range(len(self.nodes)):
            self._cluster.set_cpu(node, os.cpu_count() or 1 if cores is None else cores[node])

    def sent_between_nodes(self) -> list[int] | None:
        return [traffic.sent_bytes for traffic in self._cluster.traffic()]

    def memory_bytes(self) -> list[int]:
        return [self._cluster.memory_bytes(node) for node in range(len(self.nodes))]


class LoopbackLaunch(Launch):
    """All on this machine's loopback: ranks sleep to be slow, and the network is not emulated."""

    sleeps = True

    def _places(self, number: int) -> list[RankPlace]:
        port = free_port()
        ranks = range(len(self.node_of_rank))
        return [RankPlace(rank_environment(r, self.node_sizes, port=port, threads=self.threads)) for r in ranks]

    def _shape(self, network: NetworkDescription, cores: Sequence[float] | None) -> None:
        factors = [1.0] * len(self.node_of_rank)
        if cores is not None:
            shares = [cores[node] / self.node_sizes[node] for node in self.node_of_rank]
            factors = [max(1.0, self.threads / share) for share in shares]
        for crew in self.crews:
            self.call("set_slowdown", crew=crew, factors=factors)

    def sent_inside_nodes(self) -> list[int] | None:
        return None  # all nodes share one loopback

    def sent_between_nodes(self) -> list[int] | None:
        return None

    def memory_bytes(self) -> list[int]:
        import psutil

        sums = [0] * len(self.nodes)
        for ranks in self._ranks.values():
            for pid, node in zip(ranks.pids, self.node_of_rank, strict=True):
                sums[node] += psutil.Process(pid).memory_full_info().pss
        return sums


def make_launch(
    nodes: Sequence[NodeDescription], threads: int, in_process: bool, crews: Sequence[str]
) -> AbstractContextManager[Launch]:
    """The processes on an emulated cluster, or on the loopback."""
    return (LoopbackLaunch if in_process else EmulatedLaunch)(nodes, threads, crews)
