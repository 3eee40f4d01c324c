# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whether torch tells how much of a device's memory is in use."""

from __future__ import annotations

import torch


_COUNTS = ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated", "memory_reserved", "mem_get_info")


def counts_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own that torch counts, as CUDA and XPU do, and MPS does not."""
    if device.type == "cpu" or not all(hasattr(torch.get_device_module(device), name) for name in _COUNTS):
        return False
    try:
        torch.get_device_module(device).mem_get_info(device)
    except RuntimeError:  # some drivers do not tell what is free
        return False
    return True
