# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`NodeLaunch`: the ranks' processes on real nodes, one of which is this machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from accelerate_lshdp.comparing.launch import CALL_SECONDS, ENGINE, Launch
from accelerate_lshdp.comparing.node_agent import NodeAgent, answer, free_ports
from accelerate_lshdp.comparing.rank_processes import FAILURE_GRACE, RankError
from accelerate_lshdp.runtime.node_links import NodeLink, NodeLinkError


# Seconds beyond those of a call, for the ways to and from the other nodes.
_WAYS_SECONDS = 10.0
# Of requests, over all launches: a late answer to one that was given up must not be taken for that to another.
_numbers = itertools.count(1)


class NodeLaunch(Launch):
    """The processes of all ranks on real nodes. They are started and ended again and again; the agents stay.

    Args:
        agent: of this node, node 0.
        links: to the agents of nodes 1, 2, ...
        node_sizes: ranks of each node.
        threads: of every rank's computation; None: what each node has.
        kinds: as in `Launch`.
    """

    def __init__(
        self,
        agent: NodeAgent,
        links: Sequence[NodeLink],
        node_sizes: Sequence[int],
        threads: int | None,
        kinds: Sequence[str],
    ) -> None:
        super().__init__(node_sizes, kinds)
        self._agent = agent
        self._links = dict(enumerate(links, start=1))
        self._number = 0
        self._threads = threads

    @property
    def several_clocks(self) -> bool:
        return bool(self._links)

    def __enter__(self) -> NodeLaunch:
        try:
            self.ask("start", {"kinds": free_ports(self.kinds), "threads": self._threads})
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def call(self, method: str, *, kind: str = ENGINE, timeout: float = CALL_SECONDS, **arguments: Any) -> list[Any]:
        request = {"kind": kind, "method": method, "timeout": timeout, "arguments": arguments}
        told = self.ask("call", request, timeout)
        return [result for node in told for result in node]

    def sent_between_nodes(self) -> list[int] | None:
        sent = self.ask("sent_bytes")
        return None if None in sent else sent

    def sent_inside_nodes(self) -> list[int] | None:
        return None  # a node's loopback is not its ranks' alone

    def memory_meter(self) -> _NodesMemory:
        return _NodesMemory(self)

    def ask(
        self, request: str, arguments: Mapping[str, Any] | None = None, timeout: float = CALL_SECONDS
    ) -> list[Any]:
        """The answers of all nodes' agents to one request, node by node.

        Args:
            request: a method of `NodeAgent`.
            arguments: of it.
            timeout: seconds.

        Raises:
            RankError: of the node that failed first. Ranks are usable only if all nodes have answered and say so.
        """
        self._number, arguments = next(_numbers), arguments or {}
        answers: dict[int, Mapping[str, Any]] = {}
        failed: list[int] = []

        def take(node: int, deadline: float) -> bool:
            answers[node] = self._receive(node, request, deadline)
            if "error" in answers[node]:
                failed.append(node)
            return "error" in answers[node]

        for node, link in self._links.items():
            try:
                link.send({"number": self._number, "request": request, "arguments": arguments})
            except OSError:
                raise RankError(_gone(node)) from None
        deadline = time.monotonic() + timeout + _WAYS_SECONDS
        self._agent.elsewhere = {link.connection: partial(take, node, deadline) for node, link in self._links.items()}
        answers[0] = self._named(0, answer(self._agent, request, arguments))
        if "error" in answers[0]:
            failed.append(0)
        # This node's ranks have answered: the others' have, too, or wait for one that failed.
        for node in sorted(self._links.keys() - answers.keys()):
            if failed:
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
            take(node, deadline)
        if failed:
            first = answers[failed[0]]
            usable = all(entry.get("ranks_usable", True) for entry in answers.values())
            raise RankError(first["error"], usable, first["summary"])
        return [answers[node]["result"] for node in range(len(self.node_sizes))]

    def _receive(self, node: int, request: str, deadline: float) -> Mapping[str, Any]:
        """A node's answer to the last request; an error if it has gone or is late."""
        problem = f"node {node} had not finished {request} in time"
        try:
            while True:
                # Answers to requests that were given up come late.
                found = self._links[node].receive(max(0.0, deadline - time.monotonic()))
                if found.get("number") == self._number:
                    return self._named(node, found)
        except (EOFError, OSError):
            problem = _gone(node)
        except NodeLinkError as error:
            problem = f"{problem}: {error}"
        return {"error": problem, "summary": problem, "ranks_usable": False}

    def _named(self, node: int, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """A node's answer; if it is an error, its text names the node."""
        if "error" not in found or not self._links:
            return found
        return {**found, **{key: f"node {node}: {found[key]}" for key in ("error", "summary")}}

    def _stop(self) -> None:
        """Ends the processes of all nodes that can be reached: those of a node that has gone end with its command."""
        self._number = next(_numbers)
        self._agent.stop()
        for node, link in self._links.items():
            try:
                link.send({"number": self._number, "request": "stop", "arguments": {}})
            except OSError:
                continue
            self._receive(node, "stop", time.monotonic() + CALL_SECONDS)


class _NodesMemory:
    """The memory of the rank processes of all nodes while its block runs; see `PeakMemory`."""

    def __init__(self, launch: NodeLaunch) -> None:
        self.peak_bytes: list[int] | None = None
        self._launch = launch

    def __enter__(self) -> _NodesMemory:
        self._launch.ask("start_memory_meter")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else the processes are ended, and nobody asks
            self.peak_bytes = self._launch.ask("end_memory_meter")


def _gone(node: int) -> str:
    return f"node {node} has gone; what its command printed says why"
