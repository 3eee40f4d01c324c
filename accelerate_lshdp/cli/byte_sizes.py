# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Reading and writing amounts of memory such as ``8GB``, and writing speeds."""

from __future__ import annotations

import argparse
import re


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Upper case: users write kb, Kb and KB for the same amount.
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes from ``8GB``, ``512 MB`` or ``7.5GiB`` (argparse ``type``)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    count = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an amount of memory such as 8GB, 512MB or 7.5GiB")
    return count


def format_bytes(count: float) -> str:
    """Bytes in SI units, three digits: ``6.25 GB``."""
    for unit in ("TB", "GB", "MB", "KB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.3g} {unit.replace('K', 'k')}"
    return f"{count:.0f} B"


def format_speed(samples_per_second: float) -> str:
    """Samples a second, at least three digits and no exponent: ``0.352``, ``171.4``, ``12,345``."""
    return f"{samples_per_second:,.0f}" if samples_per_second >= 1000 else f"{samples_per_second:.4g}"
