# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints with automatic numbers: which number comes next, and which of them is the oldest.

Their order is that of the generations in their manifests, neither that of the numbers, which a user may choose, nor
that of the files' times, which copying changes.
"""

from __future__ import annotations

import re
from pathlib import Path

from accelerate_lshdp.checkpoint.folder import MANIFEST, Manifest, drop, hidden_names
from accelerate_lshdp.checkpoint.shared_folder import entries, may_hold


_NUMBERED = re.compile(r"checkpoint_(\d+)")


def numbered(folder: Path, number: int) -> Path:
    """The path of the checkpoint with a number."""
    return folder / f"checkpoint_{number}"


def next_number(folder: Path) -> int:
    """One more than the largest number that anything in `folder` has, or was about to get when its writer died."""
    # Hidden folders count: what a killed writer has completed gets its name at the next save or load.
    names = [*(path.name for path in entries(folder)), *hidden_names(folder)]
    return max((int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))), default=-1) + 1


def drop_oldest(folder: Path, limit: int) -> None:
    """Keeps the `limit` newest numbered checkpoints of this node; what is no checkpoint of ours stays.

    Nodes that share the folder may do this at the same time.
    """
    dated: list[tuple[tuple[int, int, str], Path]] = []
    # By each node for itself: its own folder may hold other checkpoints than those of other nodes.
    for path in entries(folder):
        if _NUMBERED.fullmatch(path.name) and may_hold(path, MANIFEST):
            try:
                dated.append((Manifest.read(path).age, path))
            except ValueError:  # damaged: of no use to anybody, so it goes first
                dated.append(((-1, -1, path.name), path))
            except OSError:  # gone, or not readable at the moment, which says nothing about what is in it
                continue
    # The newest always stays, whatever limit is asked for: this runs after it was saved.
    for _, path in sorted(dated)[: -max(limit, 1)]:
        drop(path)
