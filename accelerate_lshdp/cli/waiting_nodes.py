# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`report_waiting`: prints which nodes a launcher still waits for, and where they have to connect.

torch waits up to ten minutes in silence, in one call: for node 0 to listen, then for all nodes to connect to it. What
is known in the meantime are the TCP connections of this process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from accelerate_lshdp.runtime.launched_ranks import ranks_of_this_launcher


#: Seconds between two lines.
EVERY_SECONDS = 10.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of the nodes of a launch.

    Args:
        node: index of this node.
        addresses: the addresses of all nodes; None for those that are not known.
        address: the address of node 0, as the other nodes reach it.
        port: the port on which node 0 listens.
    """

    node: int
    addresses: tuple[str | None, ...]
    address: str
    port: int

    def describe(self, connected: Sequence[str], seconds: float) -> str:
        """One line that says which nodes this node waits for.

        Args:
            connected: addresses of the nodes that have connected to this one; on nodes other than node 0 the address
                of node 0, once it has answered.
            seconds: seconds that this node has waited.
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
        # Addresses may be unknown or those of another interface, so the number of connections counts, not the names.
        missing = [node for node in others if self.addresses[node] not in connected]
        count = len(others) - len(connected)
        if count <= 0:
            return f"{waited} {self._names(others)} to begin, which have connected to {place}"
        text = self._names(missing) if len(missing) == count else f"{count} of {self._names(missing or others)}"
        so_far = f"; connected so far: {', '.join(sorted(connected))}" if connected else ""
        return f"{waited} {text} to connect to {place}{so_far}"

    def connected(self) -> list[str]:
        """The addresses for `describe`, from the established TCP connections of this process."""
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
    meeting: Meeting,
    is_over: Callable[[], bool],
    *,
    every: float = EVERY_SECONDS,
    stream: TextIO | None = None,
    command: str = "launch",
) -> Iterator[None]:
    """Prints a line every ``every`` seconds inside the block, until ``is_over`` returns true.

    Args:
        meeting: the rendezvous.
        is_over: returns whether all nodes have met.
        every: seconds between two lines.
        stream: where to print; None: stderr.
        command: the subcommand that waits.
    """
    # A thread, as torch waits in one blocking call.
    left = threading.Event()

    def report() -> None:
        began = time.monotonic()
        due = began + every
        # Looked at more often than told: what was over for a moment only, as ranks that fail soon, was over.
        while not left.wait(min(every, _LOOK_SECONDS)) and not is_over():
            if time.monotonic() >= due:
                due += every
                line = meeting.describe(meeting.connected(), time.monotonic() - began)
                print(f"accelerate-lshdp {command}: {line}", file=stream or sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def has_started_ranks() -> bool:
    """Whether this launcher has ranks: it starts them after all nodes have met."""
    return bool(ranks_of_this_launcher())


def _plain(address: str) -> str:
    """An IPv4 address without the prefix that it has on an IPv6 socket; other addresses unchanged."""
    return address.removeprefix("::ffff:")
