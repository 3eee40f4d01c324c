# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Functions that are called whenever an `LSHDPAccelerator` is made, for what is built on it."""

from __future__ import annotations

from collections.abc import Callable


_listeners: list[Callable[[], None]] = []


def when_created(function: Callable[[], None]) -> None:
    """Calls ``function`` at the beginning of every `LSHDPAccelerator` that this process makes from now on."""
    _listeners.append(function)


def created() -> None:
    """Says that an `LSHDPAccelerator` is being made."""
    for function in _listeners:
        function()
