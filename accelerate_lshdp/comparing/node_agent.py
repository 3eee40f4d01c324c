# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`NodeAgent`: starts, calls and measures the rank processes of one real node, for the driver on node 0."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from accelerate_lshdp.comparing.memory_meter import MemoryMeter, proportional_set_size
from accelerate_lshdp.comparing.rank_processes import (
    LOOPBACK,
    RankError,
    RankPlace,
    RankProcesses,
    rank_environment,
)
from accelerate_lshdp.comparing.results import describe_machine
from accelerate_lshdp.runtime.free_port import free_port
from accelerate_lshdp.runtime.node_links import NodeLink, NodeLinkError


_COMMAND = (sys.executable, "-m", "accelerate_lshdp.comparing.rank")


@dataclass(frozen=True)
class NodePlace:
    """The place of a node among the others.

    Args:
        node: its index.
        node_sizes: ranks of each node.
        address: of node 0, as the other nodes reach it.
        port: of node 0, where the nodes have met.
        on_gpu: whether ranks compute on GPUs.
        usable_cores: of this node, for its ranks.
    """

    node: int
    node_sizes: tuple[int, ...]
    address: str
    port: int
    on_gpu: bool
    usable_cores: int

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = sum(self.node_sizes[: self.node])
        return range(first, first + self.node_sizes[self.node])

    def interface(self) -> str:
        """The network interface by which this node reaches node 0.

        Raises:
            NodeLinkError: no interface has the address that the system uses for it.
        """
        if len(self.node_sizes) == 1:
            return LOOPBACK
        import psutil

        family, kind, _, _, place = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # of a datagram socket: chooses the interface, and sends nothing
            own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own in [entry.address.partition("%")[0] for entry in addresses]:
                return name
        raise NodeLinkError(f"found no network interface with the address {own}, by which {self.address} is reached")


class NodeAgent:
    """The rank processes of one node. Its methods take and return JSON values, for they may be called from node 0.

    Args:
        place: of the node.

    Attributes:
        place: of the node.
        elsewhere: connections to other nodes that are watched during a call (`RankProcesses.call`).
    """

    def __init__(self, place: NodePlace) -> None:
        self.elsewhere: dict[Connection, Callable[[], bool]] = {}
        self.place = place
        # One that the user has named is the right one, as for every other run on these nodes.
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME") or place.interface()
        self._ranks: dict[str, RankProcesses] = {}
        self._called: RankProcesses | None = None
        self._stack = ExitStack()
        self._meter: MemoryMeter | None = None

    def start(self, *, kinds: Mapping[str, int], threads: int | None) -> None:
        """Starts the processes.

        Args:
            kinds: by name, the port of node 0 on which their ranks meet.
            threads: of every rank's computation; None: what the node has for each of its ranks.
        """
        ranks = self.place.ranks
        for kind, port in kinds.items():
            places = [RankPlace(self._environment(rank, port, threads)) for rank in ranks]
            self._ranks[kind] = self._stack.enter_context(RankProcesses(_COMMAND, places, ranks[0]))

    def _environment(self, rank: int, port: int, threads: int | None) -> dict[str, str]:
        environment = rank_environment(
            rank,
            self.place.node_sizes,
            port=port,
            address=self.place.address,
            interface=self._interface,
            threads=threads or max(1, self.place.usable_cores // len(self.place.ranks)),
            on_gpu=self.place.on_gpu,
        )
        if self.place.on_gpu and len(self.place.node_sizes) > 1:
            environment.setdefault("NCCL_SOCKET_IFNAME", self._interface)
        return environment

    def call(self, *, kind: str, method: str, timeout: float, arguments: Mapping[str, Any]) -> list[Any]:
        """What a rank's method returned in the processes of a kind, in the order of this node's ranks."""
        ranks = self._ranks[kind]
        if ranks is not self._called:
            # Not as soon as they have answered: ranks of other nodes may still need them then, all of them rank 0's
            # store. Node 0 calls another kind when all nodes have.
            if self._called is not None:
                self._called.pause()
            ranks.wake()
            self._called = ranks
        return ranks.call(method, timeout=timeout, elsewhere=self.elsewhere, **arguments)

    def machine(self) -> dict[str, Any]:
        """This node's processor, cores, memory and kernel."""
        return describe_machine()

    def sent_bytes(self) -> int | None:
        """Bytes that left this node by the interface to the others so far, whoever sent them; None: it is alone."""
        import psutil

        if self._interface == LOOPBACK:
            return None
        return psutil.net_io_counters(pernic=True)[self._interface].bytes_sent

    def start_memory_meter(self) -> None:
        """Begins to measure the memory of this node's rank processes."""
        self._meter = MemoryMeter(self._memory_bytes)
        self._stack.callback(self._meter.stop)
        self._meter.__enter__()

    def end_memory_meter(self) -> int:
        """Ends the measurement; returns the most bytes that they had together."""
        self._meter.__exit__(None)
        return self._meter.peak_bytes[0]

    def stop(self) -> None:
        """Ends the processes."""
        self._stack.close()
        self._stack, self._ranks, self._called = ExitStack(), {}, None

    def _memory_bytes(self) -> list[int]:
        return [sum(proportional_set_size(pid) for ranks in self._ranks.values() for pid in ranks.pids)]


#: The methods that node 0 may call on other nodes' agents.
REQUESTS = ("machine", "start", "call", "sent_bytes", "start_memory_meter", "end_memory_meter", "stop")


def answer(agent: NodeAgent, request: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request: its result, or the parts of a RankError."""
    try:
        return {"result": getattr(agent, request)(**arguments)}
    except RankError as error:
        return {"error": str(error), "summary": error.summary, "ranks_usable": error.ranks_usable}
    except Exception as error:  # of this node alone: node 0 has to hear of it
        text = f"{type(error).__name__}: {error}"
        return {"error": text, "summary": text, "ranks_usable": False}


def serve_node_0(link: NodeLink, agent: NodeAgent) -> int:
    """On another node than node 0: answers its requests until it has finished.

    Args:
        link: to node 0.
        agent: of this node.

    Returns:
        The exit code that node 0 tells.

    Raises:
        NodeLinkError: node 0 has gone before.
    """
    # Node 0 sends nothing while it waits for an answer: if it does, it does not wait any more.
    agent.elsewhere = {link.connection: _give_up}
    try:
        while True:
            message = link.receive()
            if "finished" in message:
                return int(message["finished"])
            if message.get("request") not in REQUESTS:
                raise NodeLinkError(f"found the request {message.get('request')!r}, expected one of {REQUESTS}")
            link.send({"number": message["number"], **answer(agent, message["request"], message["arguments"])})
    except (EOFError, OSError):
        raise NodeLinkError("node 0 has gone before the comparison was finished; its output says why") from None
    finally:
        agent.stop()
        link.close()


def _give_up() -> bool:
    raise RankError("node 0 has given the call up")


def free_ports(names: Sequence[str]) -> dict[str, int]:
    """A port of this machine for each name."""
    return {name: free_port() for name in names}
