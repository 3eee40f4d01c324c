# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Finds a port for processes that are still to be started."""

from __future__ import annotations

import random
import socket
from pathlib import Path


_SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Below these are ports of well-known services.
_FIRST = 10_000
_ATTEMPTS = 100


def free_port() -> int:
    """A TCP port of the loopback on which nobody listens now.

    The process that is to listen on it imports torch first, which takes seconds. Meanwhile every connection and every
    listener that asks for any port gets one of the system's range (ip(7), ``ip_local_port_range``). So the port is one
    below that range, if there is any.
    """
    first = int(_SYSTEM_RANGE.read_text().split()[0]) if _SYSTEM_RANGE.exists() else 0
    # Not the generator that scripts and tests seed: all processes with one seed would get the same port.
    generator = random.SystemRandom()
    for _ in range(_ATTEMPTS if first > _FIRST else 0):
        port = generator.randrange(_FIRST, first)
        if (found := _bound(port)) is not None:
            return found
    return _bound(0)


def _bound(port: int) -> int | None:
    """The port, if it can be bound to; 0 asks the system for one."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            if port == 0:
                raise
            return None
        return probe.getsockname()[1]
