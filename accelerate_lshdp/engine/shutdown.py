"""A clean end of the process.

gloo's worker threads can drop the last reference to a finished collective after the interpreter began to shut down,
and then end the process with SIGABRT, ``terminate called without an active exception`` (pytorch issue 190489). Neither
a barrier nor ``destroy_process_group`` alone cures it. What does: before the interpreter goes, collect garbage so that
no model or mesh keeps a group, destroy the groups, and wait a moment for gloo's threads to finish.
"""

from __future__ import annotations

import atexit
import gc
import time
from pathlib import Path

import torch.distributed as dist


_GLOO_THREAD_PREFIX = "pt_gloo"
_POLL_SECONDS = 0.005
_LONGEST_WAIT_SECONDS = 0.1
_registered = False


def install_clean_exit() -> None:
    """Registers the exit handler, once a process. Safe to call at any time."""
    global _registered
    if not _registered:
        atexit.register(shut_down)
        _registered = True


def shut_down() -> None:
    """Ends distributed communication of this process; does nothing if there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    # Sleeping releases the GIL, which the worker threads need in order to drop what they hold.
    while _gloo_threads() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _gloo_threads() -> list[str]:
    """Names of this process's gloo threads; empty where /proc does not exist (then there is nothing to wait on)."""
    names = []
    for comm in Path("/proc/self/task").glob("*/comm"):
        try:
            name = comm.read_text().strip()
        except OSError:  # the thread ended between listing and reading
            continue
        if name.startswith(_GLOO_THREAD_PREFIX):
            names.append(name)
    return names
