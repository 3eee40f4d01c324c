# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exit codes of commands that start other processes."""

from __future__ import annotations


#: A shell's exit code for a process that signal n has ended is 128 + n.
SIGNAL_BASE = 128


def shell_code(returncode: int) -> int:
    """The exit code as a shell has it, from Python's return code (negative: ended by that signal)."""
    return returncode if returncode >= 0 else SIGNAL_BASE - returncode
