# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Connections between the commands of `bench` and `doctor` on several nodes: each of the others has one to node 0.

Messages are JSON objects. Node 0 sends requests, one at a time, and every other node answers each of them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from accelerate_lshdp import __version__
from accelerate_lshdp.runtime.listening import listen_everywhere


#: All nodes have to be started within it, as for torch's rendezvous.
MEETING_SECONDS = 600.0
_RETRY_SECONDS = 0.5
# For the first message on a new connection, which may be of a program that has nothing to do with this.
_HELLO_SECONDS = 10.0
_LARGEST_HELLO = 10_000
_LOOPBACK_NAMES = ("localhost", "::1")


class NodeLinkError(ValueError):
    """The nodes did not meet, do not fit each other, or one of them has gone; the message says which and why."""


@dataclass(frozen=True)
class Hello:
    """A node's introduction, with what must be the same on all nodes.

    Args:
        node: its index.
        ranks: that it starts.
        nodes: number of nodes that its command line or configuration names.
        config: digest of its configuration file.
        node_sizes: ranks of all nodes, as its command line has them; None: it does not.
        version: of accelerate_lshdp.
    """

    node: int
    ranks: int
    nodes: int
    config: str
    node_sizes: list[int] | None = None
    version: str = __version__


class NodeLink:
    """A connection to another node."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(connected.detach())

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Raises OSError if the other node has gone."""
        self.connection.send_bytes(json.dumps(message).encode())

    def receive(self, timeout: float | None = None, largest: int | None = None) -> dict[str, Any]:
        """The next message.

        Args:
            timeout: seconds; None: as long as it takes.
            largest: of its bytes; None: any.

        Raises:
            NodeLinkError: there was none in time, or what came is no message.
            EOFError, OSError: the other node has gone.
        """
        if not self.connection.poll(timeout):
            raise NodeLinkError(f"found no message after {timeout:g} s, expected one")
        try:
            message = json.loads(self.connection.recv_bytes(largest))
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NodeLinkError("found something other than a message of accelerate-lshdp")
        return message

    def close(self) -> None:
        """Ends the connection."""
        self.connection.close()


def wait_for_nodes(
    own: Hello, address: str, port: int, say: Callable[[str], None], seconds: float = MEETING_SECONDS
) -> tuple[list[NodeLink], list[int]]:
    """On node 0: waits until all other nodes have connected.

    Args:
        own: of node 0.
        address: of node 0, as the others reach it.
        port: where it listens.
        say: tells whoever waits about connections that are none of them.
        seconds: how long.

    Returns:
        The links to nodes 1, 2, ..., and the ranks of all nodes.

    Raises:
        NodeLinkError: they did not come in time, or one does not fit; then all of them get the message, too.
        OSError: the port cannot be listened to.
    """
    links: dict[int, NodeLink] = {}
    sizes = {0: own.ranks}
    deadline = time.monotonic() + seconds
    with ExitStack() as made:
        made.callback(lambda: [link.close() for link in links.values()])
        listener = made.enter_context(_listen(address, port))
        while len(sizes) < own.nodes:
            listener.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                link = NodeLink(listener.accept()[0])
            except (TimeoutError, BlockingIOError):
                missing = ", ".join(str(node) for node in range(own.nodes) if node not in sizes)
                raise NodeLinkError(
                    f"found no connection of node {missing} after {seconds:g} s, expected the same command there with"
                    f" --node-rank, and that {address}:{port} can be reached from it"
                ) from None
            try:
                hello = Hello(**link.receive(_HELLO_SECONDS, _LARGEST_HELLO))
            except (NodeLinkError, TypeError, EOFError, OSError) as error:
                say(f"a connection to port {port} is none of a node ({error}); waiting on")
                link.close()
                continue
            problem = _mismatch(own, hello, sizes)
            if problem is not None:
                for other in (link, *links.values()):
                    other.send({"error": problem})
                link.close()
                raise NodeLinkError(problem)
            links[hello.node], sizes[hello.node] = link, hello.ranks
        node_sizes = [sizes[node] for node in range(own.nodes)]
        for link in links.values():
            link.send({"node_sizes": node_sizes})
        listener.close()
        made.pop_all()
    return [links[node] for node in range(1, own.nodes)], node_sizes


def join_node_0(own: Hello, address: str, port: int, seconds: float = MEETING_SECONDS) -> tuple[NodeLink, list[int]]:
    """On another node: connects to node 0 and waits until all nodes have.

    Args:
        own: of this node.
        address: of node 0.
        port: where node 0 listens.
        seconds: how long.

    Returns:
        The link to node 0, and the ranks of all nodes.

    Raises:
        NodeLinkError: node 0 did not answer in time, or refuses this node.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            link = NodeLink(socket.create_connection((address, port), timeout=_HELLO_SECONDS))
            break
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise NodeLinkError(
                    f"found no answer of node 0 at {address}:{port} after {seconds:g} s ({error}), expected the same"
                    " command there with --node-rank 0. Correct --main-ip, --main-port or a firewall"
                ) from None
            time.sleep(_RETRY_SECONDS)
    try:
        link.send(asdict(own))
        answer = link.receive(max(0.0, deadline - time.monotonic()))
    except (EOFError, OSError, NodeLinkError) as error:
        link.close()
        raise NodeLinkError(f"node 0 at {address}:{port} did not go on: {str(error) or 'it has ended'}") from None
    if "error" in answer:
        link.close()
        raise NodeLinkError(str(answer["error"]))
    return link, list(answer["node_sizes"])


def _mismatch(own: Hello, hello: Hello, sizes: Mapping[int, int]) -> str | None:
    """One sentence that says why a node does not fit; None if it does."""
    place = f"node {hello.node}"
    if hello.version != own.version:
        return (
            f"found accelerate_lshdp {hello.version} on {place}, expected {own.version} as on node 0. Install it there"
        )
    if hello.nodes != own.nodes:
        return f"found {hello.nodes} nodes on {place}, expected {own.nodes} as on node 0. Correct --nodes"
    if None not in (own.node_sizes, hello.node_sizes) and own.node_sizes != hello.node_sizes:
        return (
            f"found --nodes {hello.node_sizes} on {place}, expected {own.node_sizes} as on node 0. Correct one of them"
        )
    if not 1 <= hello.node < own.nodes or hello.node in sizes:
        return (
            f"found {place} connecting to node 0, which waits for others. Give each of the {own.nodes} nodes a"
            " --node-rank of its own"
        )
    if hello.config != own.config:
        return f"found another configuration file on {place} than on node 0, expected the same. Copy it to all nodes"
    return None


def _listen(address: str, port: int) -> socket.socket:
    """A listening socket on all interfaces, or on the loopback if that is what the address names."""
    # A host name often means the loopback on its own machine, so other addresses are not bound.
    loopback = address in _LOOPBACK_NAMES or address.startswith("127.")
    family = socket.AF_INET6 if address == "::1" else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family) if loopback else listen_everywhere(port)
    except OSError as error:
        raise OSError(f"port {port} cannot be used ({error.strerror}). Give all nodes another --main-port") from None
