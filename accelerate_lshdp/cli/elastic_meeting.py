# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where the launchers of an elastic run meet: the socket of this one, and what it says of itself at first."""

from __future__ import annotations

import errno
import math
import secrets
import socket
import time
from collections.abc import Callable

from accelerate_lshdp.cli.waiting_nodes import Meeting
from accelerate_lshdp.runtime.free_port import free_port
from accelerate_lshdp.runtime.membership.generation import Member


#: Errors of a network that is not up yet, or of names that cannot be asked for now. EINVAL: Linux has a route that
#: drops what is sent, as VPNs set one until they are connected.
_PASSING = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EINVAL, socket.EAI_AGAIN)
_RETRY_SECONDS, _TELL_SECONDS = 1.0, 10.0


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


def bound_socket(meeting: Meeting, say: Callable[[str], None]) -> tuple[socket.socket, tuple[str, int]]:
    """A socket at the address by which the others reach this node, and that address.

    On a machine whose network is not up yet, as when it was just switched on, the function waits for the network.

    Args:
        meeting: of the launchers.
        say: prints a line.

    Raises:
        ValueError: the address of node 0 is unknown, or is not one of this machine's if it is node 0; or the port is
            taken.
    """
    told_at = -math.inf
    while True:
        try:
            return _bound(meeting)
        except OSError as error:
            place = f"{meeting.address}:{meeting.port}"
            if not _may_pass(error):
                raise ValueError(
                    f"the launcher of node {meeting.node} cannot meet the others at {place}: {error}. Correct"
                    " --main-ip, or choose another --main-port on all nodes"
                ) from error
            if time.monotonic() - told_at > _TELL_SECONDS:
                told_at = time.monotonic()
                say(f"waits for a network, to meet the others at {place}: {error}. Bring it up, or correct --main-ip")
        time.sleep(_RETRY_SECONDS)


def _bound(meeting: Meeting) -> tuple[socket.socket, tuple[str, int]]:
    """As `bound_socket`, at once. Raises OSError if there is no way to node 0, or the port is taken."""
    own = main = socket.gethostbyname(meeting.address)
    if meeting.node > 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((main, meeting.port))  # sends nothing
            own = probe.getsockname()[0]
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        bound.bind((own, port_of(meeting, meeting.node)))
    except OSError:
        bound.close()
        raise
    return bound, bound.getsockname()


def _may_pass(error: OSError) -> bool:
    """Whether an error may be that of a network which comes up."""
    # Node 0 lacks its own address then; so does a machine that was taken for node 0 by mistake.
    return error.errno in _PASSING or (error.errno == errno.EADDRNOTAVAIL and not _has_network())


def _has_network() -> bool:
    """Whether this machine has an address beside that of the loopback."""
    import psutil

    found = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    return any(each.family == socket.AF_INET and not each.address.startswith("127.") for each in found)
