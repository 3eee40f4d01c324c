# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The format of numbers in tables and pictures."""

from __future__ import annotations


def format_number(value: float) -> str:
    """A number with three digits or more and without exponent: ``0.352``, ``5.00``, ``17.1``, ``12,345``."""
    # Thresholds half a unit below: 99.96 rounds to 100, which has three digits already.
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
