"""A clean end of the process.

gloo's worker threads can drop the last reference to a finished collective after the interpreter began to shut down.
They then ask for an interpreter that is gone, and the process ends with SIGABRT, ``terminate called without an active
exception`` (pytorch issue 190489). Neither a barrier nor ``destroy_process_group`` cures it, because models and meshes
keep a destroyed group and its threads. What does: before the interpreter goes, collect garbage, destroy the groups and
let go of the interpreter until gloo's threads have nothing left to do.
"""

from __future__ import annotations

import atexit
import gc
import time
from pathlib import Path

import torch.distributed as dist


_GLOO_THREAD_PREFIX = "pt_gloo"
_POLL_SECONDS = 0.005
#: Polls in a row in which no thread had work. One would do; more cost nothing.
_IDLE_POLLS = 3
_LONGEST_WAIT_SECONDS = 10.0
#: Where threads cannot be watched.
_BLIND_WAIT_SECONDS = 0.1
_TASKS = Path("/proc/self/task")
_registered = False


def install_clean_exit() -> None:
    """Registers the exit handler, once a process. Safe to call at any time."""
    global _registered
    if not _registered:
        atexit.register(shut_down)
        _registered = True


def shut_down() -> None:
    """Ends distributed communication of this process, if the script has not done so, and waits for gloo's threads."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
    _wait_for_gloo()


def _wait_for_gloo() -> None:
    """Sleeps, which lets other threads have the interpreter, until gloo's threads are gone or idle."""
    if not _TASKS.is_dir():
        time.sleep(_BLIND_WAIT_SECONDS)
        return
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    idle = 0
    while idle < _IDLE_POLLS and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        states = _states_of_gloo_threads()
        if not states:
            return
        # A thread that wants the interpreter is made runnable when the sleep gives it away, and stays so until it has
        # had it: one that sleeps now waits for work.
        idle = idle + 1 if set(states) == {"S"} else 0


def _states_of_gloo_threads() -> list[str]:
    """What the kernel says of each gloo worker thread: ``S`` if it sleeps (proc(5), /proc/pid/stat)."""
    states = []
    for task in _TASKS.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread ended between listing and reading
            continue
        if name.startswith(_GLOO_THREAD_PREFIX):
            states.append(rest.split()[0])
    return states
