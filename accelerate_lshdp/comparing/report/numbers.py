# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Numbers as tables and pictures write them."""

from __future__ import annotations


def format_number(value: float) -> str:
    """Three digits or more, no exponent: ``0.352``, ``5.00``, ``17.1``, ``12,345``."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
