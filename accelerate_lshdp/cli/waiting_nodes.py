# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A launcher that waits for other nodes says so, for whom, and where they have to connect.

torch waits up to ten minutes in silence, in one call: for node 0 to listen, then for all nodes to connect to it. What
is known meanwhile are the connections of this process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO


EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a launch meet.

    Args:
        node: which of them this one is.
        addresses: of all nodes, as far as they are known.
        address: of node 0, as the others reach it.
        port: where node 0 listens.
    """

    node: int
    addresses: tuple[str | None, ...]
    address: str
    port: int

    def describe(self, connected: Sequence[str], seconds: float) -> str:
        """One line that says for whom this node waits.

        Args:
            connected: addresses of the nodes that have connected to this one; on other nodes than node 0: that of
                node 0, once it has answered.
            seconds: how long it has waited.
        """
        place = f"{self.address}:{self.port}"
        waited = f"node {self.node} has waited {seconds:.0f} s for"
        if self.node > 0 and not connected:
            return (
                f"{waited} node 0, which does not answer at {place}. Start it there; if it runs, correct the address, "
                "the port or a firewall"
            )
        others = [node for node in range(len(self.addresses)) if node != self.node]
        if self.node > 0:
            beyond = [node for node in others if node != 0]
            return (
                f"{waited} {self._names(beyond)}, or one of them, to connect to node 0, which answers at {place}"
                if beyond
                else f"{waited} node 0, which answers at {place}, to begin"
            )
        missing = [node for node in others if self.addresses[node] not in connected]
        count = len(others) - len(connected)
        if count <= 0:
            return f"{waited} {self._names(others)} to begin, which have connected to {place}"
        text = self._names(missing) if len(missing) == count else f"{count} of {self._names(missing or others)}"
        so_far = f"; connected so far: {', '.join(sorted(connected))}" if connected else ""
        return f"{waited} {text} to connect to {place}{so_far}"

    def connected(self) -> list[str]:
        """The addresses that `describe` asks for, from this process's connections."""
        import psutil

        process = psutil.Process()
        list_of = process.net_connections if hasattr(process, "net_connections") else process.connections  # psutil < 6
        links = [link for link in list_of("tcp") if link.status == psutil.CONN_ESTABLISHED and link.raddr]
        out = [link for link in links if link.raddr.port == self.port]
        if self.node > 0:
            return [link.raddr.ip for link in out][:1]
        # Node 0 is connected to itself, too.
        own = {link.laddr for link in out}
        return [_plain(link.raddr.ip) for link in links if link.laddr.port == self.port and link.raddr not in own]

    def _names(self, nodes: Sequence[int]) -> str:
        known = [f" ({self.addresses[node]})" if self.addresses[node] else "" for node in nodes]
        return ", ".join(f"node {node}{address}" for node, address in zip(nodes, known, strict=True))


@contextmanager
def report_waiting(
    meeting: Meeting, is_over: Callable[[], bool], *, every: float = EVERY_SECONDS, stream: TextIO | None = None
) -> Iterator[None]:
    """In the block, a line on stderr for every ``every`` seconds of waiting, until ``is_over``."""
    left = threading.Event()

    def tell() -> None:
        began = time.monotonic()
        while not left.wait(every) and not is_over():
            line = meeting.describe(meeting.connected(), time.monotonic() - began)
            print(f"accelerate-lshdp launch: {line}", file=stream or sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def has_started_ranks() -> bool:
    """Whether this launcher has started processes: the nodes have met then."""
    import psutil

    return bool(psutil.Process().children())


def _plain(address: str) -> str:
    """IPv4 addresses as such, where the socket is one of IPv6."""
    return address.removeprefix("::ffff:")
