# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Safe forks: worker processes of loaders that do not hang at their start.

Before Python 3.12 and the last patch releases of 3.10 and 3.11, a fork can copy the lock on the interpreter's list of
threads while another thread holds it, and the child waits for it forever (python/cpython#112275). Threads of gloo hold
it for a moment whenever they let go of a finished collective, and a pass over a loader begins with one: its ranks
agree, and at once the workers are forked. A thread whose collective still waits for a peer may
wake at any time, so that forks amid asynchronous collectives are safer, but not safe.
"""

from __future__ import annotations

import os
import sys

from accelerate_lshdp.runtime.torch_threads import wait_until_idle


_LONGEST_SECONDS = 0.1
_installed = False


def install_safe_forks() -> None:
    """Makes each later ``os.fork`` wait, some milliseconds and at most 0.1 s, until torch's threads rest.

    Does nothing from Python 3.12 on. Safe to call at any time.
    """
    global _installed
    if not _installed and sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_rest)
        _installed = True


def _rest() -> None:
    # Two polls in a row: a thread can sleep in the first one because it has just come to want the interpreter.
    wait_until_idle("pt_", poll_seconds=0.001, polls=2, longest_seconds=_LONGEST_SECONDS, blind_seconds=0.001)
