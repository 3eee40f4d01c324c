# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Seconds as arguments of commands."""

from __future__ import annotations

import argparse
import math


def seconds(text: str) -> float:
    """Reads a number of seconds that may be 0.

    Raises:
        argparse.ArgumentTypeError: it is negative, infinite, or no number.
    """
    found = _number(text)
    if not 0 <= found < math.inf:  # NaN fails as well
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of seconds, at least 0")
    return found


def positive_seconds(text: str) -> float:
    """Reads a number of seconds above 0.

    Raises:
        argparse.ArgumentTypeError: it is 0, negative, infinite, or no number.
    """
    found = _number(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of seconds above 0")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
