# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Waits until torch's own threads have nothing left to do.

After a collective has ended for its caller, the thread of gloo that ran it still drops what it holds: tensors and
other objects of Python, for which it enters the interpreter. Nothing in torch says when that is over; the kernel does.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path


_TASKS = Path("/proc/self/task")


def wait_until_idle(
    prefix: str, *, poll_seconds: float, polls: int, longest_seconds: float, blind_seconds: float
) -> None:
    """Sleeps, which lets other threads have the interpreter, until the threads with a name's prefix are gone or idle.

    Args:
        prefix: what the threads' names begin with (``pt_gloo``).
        poll_seconds: seconds of one sleep; there is at least one.
        polls: how many times in a row none of them may have work.
        longest_seconds: how long to go on if they do not rest.
        blind_seconds: how long to sleep where threads cannot be watched (no ``/proc``).
    """
    if not _TASKS.is_dir():
        time.sleep(blind_seconds)
        return
    deadline = time.monotonic() + longest_seconds
    idle = 0
    while idle < polls and time.monotonic() < deadline:
        time.sleep(poll_seconds)
        states = _states(prefix)
        if not states:
            return
        # A thread that wants the interpreter is made runnable when the sleep gives it away, and stays so until it has
        # had it. One that sleeps now has no work, waits for a peer, or has just come to want the interpreter, for
        # which there are further polls.
        idle = idle + 1 if set(states) == {"S"} else 0


def _states(prefix: str) -> list[str]:
    """The kernel's states of all other threads of that name: ``S`` if one sleeps (proc(5), /proc/pid/stat)."""
    states = []
    own = str(threading.get_native_id())
    for task in _TASKS.iterdir():
        if task.name == own:
            continue
        try:
            # The name is in parentheses and may hold some itself, so it ends at the last one.
            name, _, rest = (task / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:  # the thread ended between listing and reading
            continue
        if name.startswith(prefix):
            states.append(rest.split()[0])
    return states
