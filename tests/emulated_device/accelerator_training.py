# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings by the accelerator on the emulated device, as accelerate finds any device that has a name."""

from __future__ import annotations

import os
from typing import Any

import exactness
import torch_device as device
from accelerate import PartialState
from exactness import Setting


def on_emulated_device() -> None:
    """Lets accelerate take the emulated device for that of this rank."""
    device.join_device_world()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "emulated:0"
    # As on CPUs: accelerate knows no backend for a device of this name. What it has found stays for the process; asked
    # for the CPU again, it would refuse.
    PartialState(cpu=True)
    del os.environ["ACCELERATE_USE_CPU"]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """The errors of `exactness.train`, and what raced."""
    on_emulated_device()
    device.reset()
    device.configure(copy_delay=0.001)
    errors = exactness.train(Setting(**options))
    races = device.races()
    device.configure()
    return {"errors": errors, "races": races}
