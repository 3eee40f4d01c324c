# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The ranks among the children of a launcher: others look for GPUs, or are jobs of the shell that it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate_lshdp.runtime.parent_death import environment_at_start


if TYPE_CHECKING:
    import psutil

#: The module as which ``accelerate-lshdp launch`` starts every rank.
_SHIM = "accelerate_lshdp.run"


def ranks_of_this_launcher() -> list[psutil.Process]:
    """The ranks that this process, an ``accelerate-lshdp launch``, has started and that have not ended."""
    import psutil

    found = []
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and _SHIM in child.cmdline():
                found.append(child)
        except psutil.Error:  # it has ended just now
            continue
    return found


def living_ranks_beside(launcher: int) -> int | None:
    """How many ranks a launcher of torch has, this process included.

    Args:
        launcher: the parent of this process.

    Returns:
        None if that is no launcher: what has been started with the variables of a rank is a part of one.
    """
    import psutil

    started_with = environment_at_start(launcher)
    if started_with is None or "TORCHELASTIC_RUN_ID" in started_with:
        return None
    try:
        children = psutil.Process(launcher).children()
    except psutil.Error:  # it has ended, and its ranks end with it
        return None
    return sum("LOCAL_RANK" in (environment_at_start(child.pid) or {}) for child in children)
