# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Agents of machines whose users have started one command on each: over connections to node 0, without ssh."""

from __future__ import annotations

import time
from typing import Any

from accelerate_lshdp.hosts.agent import MachineAgent, answer
from accelerate_lshdp.hosts.connection import HostError, result_of
from accelerate_lshdp.runtime.node_links import NodeLink, NodeLinkError


class OwnAgent:
    """The agent of the machine on which this process runs, without a connection."""

    def __init__(self) -> None:
        self._agent = MachineAgent()

    def ask(self, request: str, timeout: float, **arguments: Any) -> Any:
        """What this machine's agent answers, as `HostConnection.ask`; it takes as long as it takes."""
        return result_of(answer(self._agent, {"request": request, "arguments": arguments}), request)


class LinkedAgent:
    """The agent at the other end of a connection, which `serve_node_0` answers for.

    Args:
        link: to it.
    """

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._number = 0

    def ask(self, request: str, timeout: float, **arguments: Any) -> Any:
        """What the other machine's agent answers, as `HostConnection.ask`."""
        self._number += 1
        deadline = time.monotonic() + timeout
        try:
            self._link.send({"number": self._number, "request": request, "arguments": arguments})
            while True:
                found = self._link.receive(max(0.0, deadline - time.monotonic()))
                if found.get("number") == self._number:
                    return result_of(found, request)
        except (EOFError, OSError, NodeLinkError) as error:
            raise HostError(
                f"it did not answer {request!r} ({str(error) or 'its command has ended'})",
                "See what its command printed",
            ) from None

    def finish(self, code: int) -> None:
        """Ends it with an exit code. Raises OSError if it has gone."""
        self._link.send({"finished": code})


def serve_node_0(link: NodeLink) -> int:
    """On another node than node 0: answers its requests until it has finished.

    Returns:
        The exit code that node 0 tells.

    Raises:
        NodeLinkError: node 0 has gone before.
    """
    agent = MachineAgent()
    try:
        while True:
            message = link.receive()
            if "finished" in message:
                return int(message["finished"])
            link.send(answer(agent, message))
    except (EOFError, OSError):
        raise NodeLinkError("node 0 has gone before it had finished; its output says why") from None
    finally:
        link.close()
