# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Writing a file so that readers see its old or its new content, never a part of it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file (UTF-8) atomically: at any moment ``path`` holds the old content or the whole new one.

    Raises:
        OSError: the file cannot be written.
    """
    # In the same folder, as a rename is atomic only within one file system; the random name lets several processes
    # write the same path at once.
    beside = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
            # The bytes have to be on the disk before the rename is: after a power cut an empty file could stand there.
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # after a rename it is gone already
