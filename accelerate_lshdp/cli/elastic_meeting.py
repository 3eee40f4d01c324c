# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where the launchers of an elastic run meet: the socket of this one, and what it says of itself at first."""

from __future__ import annotations

import secrets
import socket

from accelerate_lshdp.cli.waiting_nodes import Meeting
from accelerate_lshdp.runtime.free_port import free_port
from accelerate_lshdp.runtime.membership.generation import Member


def new_member(address: tuple[str, int], ranks: int) -> Member:
    """This launcher as one that has not been a member before.

    Args:
        address: IP address and port at which the others reach it.
        ranks: that it starts.
    """
    return Member(f"{address[0]}:{address[1]}", secrets.token_hex(8), address, ranks, free_port())


def port_of(meeting: Meeting, node: int) -> int:
    """The UDP port of a node's launcher: the same on all machines; on one machine each needs its own."""
    return meeting.port + (node if meeting.address.startswith("127.") else 0)


def bound_socket(meeting: Meeting) -> tuple[socket.socket, tuple[str, int]]:
    """A socket at the address by which the others reach this node, and that address.

    Raises:
        ValueError: the address of node 0 is unknown, or the port is taken.
    """
    try:
        main = socket.gethostbyname(meeting.address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((main, meeting.port))  # sends nothing
            own = main if meeting.node == 0 else probe.getsockname()[0]
        bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        bound.bind((own, port_of(meeting, meeting.node)))
    except OSError as error:
        raise ValueError(
            f"the launcher of node {meeting.node} cannot meet the others at {meeting.address}:{meeting.port}: {error}."
            " Correct --main-ip, or choose another --main-port on all nodes"
        ) from error
    return bound, bound.getsockname()
