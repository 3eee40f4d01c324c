# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`alone`: a block in which this process does without the other ranks what it otherwise does with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


_of_thread = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, in this thread, exchanges of objects and errors are with nobody: as in a process of one rank.

    For saving what a rank has when others can no longer be reached. What is spread over ranks cannot be had there.
    """
    before = getattr(_of_thread, "is_alone", False)
    _of_thread.is_alone = True
    try:
        yield
    finally:
        _of_thread.is_alone = before


def has_others() -> bool:
    """Whether there are ranks to exchange with: a process group exists, and no `alone` is open in this thread."""
    return not getattr(_of_thread, "is_alone", False) and dist.is_available() and dist.is_initialized()
