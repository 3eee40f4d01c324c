# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ``accelerate-lshdp launch`` says on stderr while ranks write there as well."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Writes a line on stderr in one piece."""
    # `print` writes the end of the line for itself where Python is told not to buffer (PYTHONUNBUFFERED, as in many
    # containers), and a line of a rank may come between.
    sys.stderr.write(f"accelerate-lshdp launch: {text}\n")
    sys.stderr.flush()
