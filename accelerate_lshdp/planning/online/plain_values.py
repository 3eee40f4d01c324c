# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks of values that were read from JSON, or handed over by a script."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any


def require_keys(document: object, keys: Any) -> None:
    """Raises ValueError if `document` is no object with exactly these keys."""
    if not isinstance(document, Mapping) or set(document) != set(keys):
        raise ValueError(f"found {document!r:.200}, expected an object with the keys {sorted(keys)}")


def checked_count(value: object, name: str) -> int:
    """`value` as int, NumPy integers included; not a bool or a float, whatever its value. Raises ValueError."""
    try:
        if isinstance(value, bool) or operator.index(value) < 0:
            raise TypeError
    except TypeError:
        raise ValueError(f"found {value!r:.60} in {name}, expected an integer of at least 0") from None
    return operator.index(value)


def checked_counts(values: Any, name: str) -> list[int]:
    """A list of integers of at least 0. Raises ValueError."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise ValueError(f"found {name} {values!r:.60}, expected a list of integers")
    return [checked_count(value, name) for value in values]


def checked_times(values: Any, name: str) -> list[float]:
    """A list of finite numbers of at least 0. Raises ValueError."""
    if not isinstance(values, list) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf for value in values
    ):
        raise ValueError(f"found {name} {values!r:.60}, expected a list of finite numbers of at least 0")
    return list(values)


def checked_positive(values: Any, name: str) -> list[float]:
    """A list of finite numbers above 0. Raises ValueError."""
    if 0 in (numbers := checked_times(values, name)):
        raise ValueError(f"found {name} {numbers!r:.60}, expected positive numbers")
    return numbers
