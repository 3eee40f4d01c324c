# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""With which ranks a thread exchanges objects and errors: with all, with nobody (`alone`), or with some (`among`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist


_of_thread = threading.local()
_NOBODY = object()


def alone() -> AbstractContextManager[None]:
    """Inside, in this thread, exchanges of objects and errors are with nobody: as in a process of one rank.

    For saving what a rank has when others can no longer be reached. What is spread over ranks cannot be had there.
    """
    return _exchanging_with(_NOBODY)


def among(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Inside, in this thread, exchanges are with the ranks of a group, as if there were no others.

    For saving what the ranks of a node have when other nodes can no longer be reached.

    Args:
        group: over host memory, and used by nobody else: other threads of these ranks may be in collectives.
    """
    return _exchanging_with(group)


@contextmanager
def _exchanging_with(whom: object) -> Iterator[None]:
    before = getattr(_of_thread, "whom", None)
    _of_thread.whom = whom
    try:
        yield
    finally:
        _of_thread.whom = before


def has_others() -> bool:
    """Whether there are ranks to exchange with: a process group exists, and no `alone` is open in this thread."""
    return getattr(_of_thread, "whom", None) is not _NOBODY and dist.is_available() and dist.is_initialized()


def participants() -> dist.ProcessGroup | None:
    """The group with whose ranks this thread exchanges; None: all ranks. To be asked only if `has_others`."""
    return getattr(_of_thread, "whom", None)


def place_of(rank: int) -> int:
    """The place of a rank of the world among the ranks with which this thread exchanges; ``rank`` is one of them."""
    if not has_others():
        return 0
    group = participants()
    return rank if group is None else dist.get_group_rank(group, rank)
