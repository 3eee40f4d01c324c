# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Lines of the launcher, and tables of its ranks, stay whole in an output that other processes write to as well."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("from accelerate_lshdp.cli.messages import say; say('found')", b"accelerate-lshdp launch: found\n"),
        (
            "from accelerate_lshdp.accelerator.watch import _write; _write('step\\nranks')",
            b"lshdp | step\nlshdp | ranks\n",
        ),
    ],
)
def test_what_is_said_is_written_at_once_even_without_buffers(call: str, written: bytes) -> None:
    """Another process writes between two writes of one line."""
    hears, stderr = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # each write is a message of its own
    with hears, stderr:
        subprocess.run([sys.executable, "-u", "-c", call], stderr=stderr, check=True)
        assert hears.recv(1000) == written
