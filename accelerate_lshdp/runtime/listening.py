# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Listening sockets that every other machine can reach."""

from __future__ import annotations

import socket


def listen_everywhere(port: int) -> socket.socket:
    """A listening socket on all interfaces, for IPv4 and IPv6 where the system has both. Raises OSError.

    Args:
        port: 0: any that the system chooses.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
