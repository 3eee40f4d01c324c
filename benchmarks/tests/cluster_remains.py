# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What of an emulated cluster is still there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def remains(creator: int) -> list[Path]:
    """Namespaces and control groups of a creator, wherever they are."""
    folders = [Path("/run/netns"), *Path("/sys/fs/cgroup").glob("*"), *Path("/sys/fs/cgroup/memory").glob("*/*")]
    return [path for folder in folders for path in folder.glob(f"lshdp-{creator}-*")]


def named_shared_memory(pids: Sequence[int]) -> list[str]:
    """Files in shared memory that processes made, by their names: torch puts the process id into them."""
    return [name for name in os.listdir("/dev/shm") if any(str(pid) in name.split("_") for pid in pids)]
