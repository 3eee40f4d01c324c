# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Calls a function of a module by name, on a rank that has the emulated device.

Modules of programs import the device, so the process of pytest must not import them.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any


def call(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    device = importlib.import_module("torch_device")
    device.configure()
    with contextlib.suppress(RuntimeError):  # of a case that has failed before
        device.synchronize()
    device.reset()
    return getattr(importlib.import_module(module), name)(*arguments)
