# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ends a process with the one that started it, however that one ended.

Launchers end their ranks when they end by themselves. One that is killed cannot, and its ranks would train on, out of
reach. Standard library only: the shim runs this before the script, and what a measured process imports counts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path


#: Process that started a launch; for its direct children alone.
LAUNCHER_VARIABLE = "LSDP_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 1.0


def end_with(parent: int) -> None:
    """Kills this process as soon as its parent has ended, or now if it has; also in the middle of a collective.

    On Linux the kernel does it, even to a process that is stopped. It goes by the thread that started this process,
    which therefore has to be one that stays.

    Args:
        parent: number of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        # Asked after: a parent that ended before the call above would never be reported by the kernel.
        if os.getppid() != parent:
            _end()
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def end_with_launcher() -> None:
    """`end_with` for a process whose parent is a launcher: ours, torchrun or ``accelerate launch``; else nothing.

    ``accelerate launch`` that starts a single rank cannot be told from a shell, which may end before what it started.
    """
    # By number and not by a flag: a process further down, which inherits the variable, has another parent.
    parent = os.getppid()
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")  # removed, so that processes started from here do not inherit it
    if launcher == str(parent):
        end_with(parent)
    elif launcher.isdecimal() and "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        if _has_ended(int(launcher)):  # before this rank could tell the kernel
            _end()
    elif "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ:
        # The launcher sets the variable for its ranks. A parent that was started with it is a rank, or inside of one.
        started_with = environment_at_start(parent)
        if started_with is not None and "TORCHELASTIC_RUN_ID" not in started_with:
            end_with(parent)


def environment_at_start(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with: the kernel keeps that, not what it set itself.

    Returns:
        None if the process has ended or is another user's, and on systems that do not tell.
    """
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (pair.partition(b"=") for pair in content.split(b"\0") if pair)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _has_ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie: in containers often no parent collects the exit status of one."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "XZ"


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
