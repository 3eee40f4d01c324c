# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`folder_in_memory`: a folder in memory for the time of a launcher, of which nothing stays behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate_lshdp.runtime.elastic_rank import NodeFolder


_SHARED_MEMORY = Path("/dev/shm")
_FOLDER, _LOCK = "accelerate_lshdp_elastic_", "in_use"


@contextmanager
def folder_in_memory() -> Iterator[NodeFolder]:
    """A folder for what ranks keep, removed at the end; also removes those of launchers that were killed."""
    import fcntl  # not on all systems on which other commands run

    where = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in where.glob(f"{_FOLDER}*"):
        with suppress(OSError), (left / _LOCK).open("a") as file:  # of another user
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    # Under another name until it is locked: a launcher that starts at the same time would take it for a left one.
    made = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=where))
    folder = where / made.name.removeprefix(".")
    try:
        with (made / _LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            made.rename(folder)
            yield NodeFolder(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
