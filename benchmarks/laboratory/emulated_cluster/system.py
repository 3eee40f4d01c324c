# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Calls of the system's network tools, and names by which what a killed run left behind is known."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


#: Control groups and namespaces are named PREFIX + process id of the creator + number + name.
PREFIX = "lshdp-"
_CALL_SECONDS = 30.0
_numbers = itertools.count()


class ClusterError(RuntimeError):
    """The emulated cluster cannot be built or changed; the message says what is missing or what failed."""


def unique_name(name: str) -> str:
    """A name that shows who made what carries it."""
    return f"{PREFIX}{os.getpid()}-{next(_numbers)}-{name}"


def is_leftover(name: str) -> bool:
    """Whether something of this name was made by a run that has ended without removing it."""
    creator = name.removeprefix(PREFIX).partition("-")[0]
    return name.startswith(PREFIX) and creator.isdigit() and not Path("/proc", creator).exists()


def call(*command: str, lines: Sequence[str] = ()) -> str:
    """Runs a tool and returns its output.

    Args:
        command: the tool and its arguments.
        lines: what it reads, for the batch modes of ``ip`` and ``tc``.

    Raises:
        ClusterError: it is not there, failed or did not end.
    """
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=_CALL_SECONDS,
        )
    except FileNotFoundError:
        raise ClusterError(f"the tool `{command[0]}` is not installed; it comes with iproute2 or util-linux") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{shown}` had not ended after {_CALL_SECONDS:g} s") from None
    if done.returncode:
        given = f" (it read: {'; '.join(lines)})" if lines else ""
        raise ClusterError(f"`{shown}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}{given}")
    return done.stdout
