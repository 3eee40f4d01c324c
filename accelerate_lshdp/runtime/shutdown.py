# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ends communication before the interpreter shuts down, so that the process exits cleanly.

gloo's worker threads can drop the last reference to a finished collective after the interpreter began to shut down.
They then ask for an interpreter that is gone, and the process ends with SIGABRT, ``terminate called without an active
exception`` (pytorch issue 190489). Neither a barrier nor ``destroy_process_group`` cures it, because models and meshes
keep a destroyed group and its threads. What does: before the interpreter goes, collect garbage, destroy the groups and
let go of the interpreter until gloo's threads have nothing left to do.
"""

from __future__ import annotations

import atexit
import gc

import torch.distributed as dist

from accelerate_lshdp.runtime.dissemination import end_dissemination
from accelerate_lshdp.runtime.torch_threads import wait_until_idle


_registered = False


def install_clean_exit() -> None:
    """Registers the exit handler, once a process. Safe to call at any time."""
    global _registered
    if not _registered:
        atexit.register(shut_down)
        _registered = True


def shut_down() -> None:
    """Ends distributed communication of this process, if the script has not done so, and waits for gloo's threads."""
    end_dissemination()
    if dist.is_available() and dist.is_initialized():
        # Cycles hold finished collectives (collected before) and groups (after); both hold threads of gloo.
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
    # Also where the script has destroyed the groups itself: their threads may still be dropping what they hold. Three
    # polls in a row, as a thread can be asleep for a moment between two things to drop.
    wait_until_idle("pt_gloo", poll_seconds=0.005, polls=3, longest_seconds=10.0, blind_seconds=0.1)
