# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Files that are never half-written."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file (UTF-8). Whatever happens, ``path`` holds the old file or the whole new one.

    Raises:
        OSError: the file cannot be written.
    """
    beside = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
