# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The ranks' processes on a cluster: an emulated one, or without root on the loopback.

They import and build at full speed and meet the cluster's speeds and network only while something is measured.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from accelerate_lshdp.benchmarking.rank_processes import RankPlace, RankProcesses, free_port, rank_environment
from accelerate_lshdp.emulated_cluster import ClusterDescription, EmulatedCluster, NetworkDescription, NodeDescription


FULL_SPEED = NetworkDescription(10e9)
#: Inside a network namespace of its own, where nobody else listens.
_PORT = 29500
_CALL_SECONDS = 60.0
_COMMAND = (sys.executable, "-m", "accelerate_lshdp.benchmarking.rank")


class Launch(ABC):
    """The processes of all ranks; a context manager that ends them.

    Args:
        nodes: of the cluster.
        threads: of every rank's computation.
    """

    def __init__(self, nodes: Sequence[NodeDescription], threads: int) -> None:
        self.nodes = list(nodes)
        self.node_sizes = [node.ranks for node in nodes]
        self.node_of_rank = [index for index, node in enumerate(nodes) for _ in range(node.ranks)]
        self.threads = threads
        self._ranks: RankProcesses | None = None
        self._stack = ExitStack()

    #: Whether speeds are emulated by sleeping, which the ranks have to do themselves.
    sleeps = False

    def __enter__(self) -> Launch:
        try:
            places = self._places(self._stack)
            self._ranks = self._stack.enter_context(RankProcesses(_COMMAND, places))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def call(self, method: str, *, timeout: float = _CALL_SECONDS, **arguments: Any) -> list[Any]:
        """What `rank.Rank`'s method returned, in rank order. Raises RankError."""
        return self._ranks.call(method, timeout=timeout, **arguments)

    @property
    def pids(self) -> list[int]:
        return self._ranks.pids

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
        counted = self.call("loopback_bytes")
        return [counted[self.node_of_rank.index(node)] for node in range(len(self.nodes))]

    @abstractmethod
    def _places(self, stack: ExitStack) -> list[RankPlace]:
        """Where each rank runs; what has to be closed at the end goes to the stack."""

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

    def _places(self, stack: ExitStack) -> list[RankPlace]:
        description = ClusterDescription(tuple(self.nodes), FULL_SPEED)
        self._cluster = stack.enter_context(EmulatedCluster(description))
        self._shape(FULL_SPEED, None)
        places = []
        for rank, node in enumerate(self.node_of_rank):
            environment = rank_environment(
                rank,
                self.node_sizes,
                port=_PORT,
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

    def _places(self, stack: ExitStack) -> list[RankPlace]:
        port = free_port()
        ranks = range(len(self.node_of_rank))
        return [RankPlace(rank_environment(r, self.node_sizes, port=port, threads=self.threads)) for r in ranks]

    def _shape(self, network: NetworkDescription, cores: Sequence[float] | None) -> None:
        factors = [1.0] * len(self.node_of_rank)
        if cores is not None:
            shares = [cores[node] / self.node_sizes[node] for node in self.node_of_rank]
            factors = [max(1.0, self.threads / share) for share in shares]
        self.call("set_slowdown", factors=factors)

    def sent_inside_nodes(self) -> list[int] | None:
        return None  # all nodes share one loopback

    def sent_between_nodes(self) -> list[int] | None:
        return None

    def memory_bytes(self) -> list[int]:
        import psutil

        sums = [0] * len(self.nodes)
        for pid, node in zip(self.pids, self.node_of_rank, strict=True):
            sums[node] += psutil.Process(pid).memory_full_info().pss
        return sums


def make_launch(nodes: Sequence[NodeDescription], threads: int, in_process: bool) -> AbstractContextManager[Launch]:
    """The processes on an emulated cluster, or on the loopback."""
    return (LoopbackLaunch if in_process else EmulatedLaunch)(nodes, threads)
