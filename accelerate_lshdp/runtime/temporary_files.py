# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Temporary files that vanish with the process that made them, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def vanishing_file(name: str, text: str = "") -> Iterator[Path]:
    """A file (UTF-8) for this process and those that it starts, which they read and write by its path.

    On Linux it lies in memory, so that nothing of it stays behind even where this process is killed.

    Args:
        name: of the file; its path may have another one.
        text: what is in it at first.
    """
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        with os.fdopen(os.memfd_create(name), "w", encoding="utf-8") as file:
            # By this process's number, as /proc/self would be the child's own; flushed, as others open it by that
            # path.
            file.write(text)
            file.flush()
            yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    else:
        with TemporaryDirectory(prefix="accelerate-lshdp-") as folder:
            path = Path(folder, name)
            path.write_text(text, encoding="utf-8")
            yield path
