# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Bisection: the least integer or float with a property that all greater ones have too."""

from __future__ import annotations

import struct
from collections.abc import Callable


def least_integer(below: int, enough: int, is_enough: Callable[[int], bool]) -> int:
    """The least integer in (below, enough] with the property, which `enough` has."""
    while enough - below > 1:
        middle = (below + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            below = middle
    return enough


def least_float(below: float, enough: float, is_enough: Callable[[float], bool]) -> float:
    """The least float in (below, enough] with the property, which `enough` has; `below` is positive."""
    # Positive floats are ordered as the integers that have the same bits (IEEE 754), so the bisection ends at the
    # exact float after at most 64 steps, without a tolerance.
    return _float(least_integer(_bits(below), _bits(enough), lambda bits: is_enough(_float(bits))))


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _float(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
