# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The largest micro-batch that fits the memory of a device, judged from those that were trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


#: Share of the device's memory that may be used: the allocator fragments, and a curve is not quite a line.
USABLE = 0.9


class MemoryReading(NamedTuple):
    """Bytes of a device."""

    total: int
    """What this process may use."""
    peak: int
    """Most that was in use at a time, since the process began or the script reset it."""
    now: int
    """In use between two steps: parameters, gradients, optimizer state."""


def read_cuda_memory(device: torch.device) -> MemoryReading:
    """What CUDA says of a device; memory of other processes does not count as usable."""
    free, _ = torch.cuda.mem_get_info(device)
    return MemoryReading(
        total=free + torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
        now=torch.cuda.memory_allocated(device),
    )


class DeviceMemory:
    """Watches what training needs, to say how large a micro-batch may become.

    Args:
        device: where the forward runs. On a CPU no limit is known: its memory is shared with everything else.
        read: gives the present bytes; default: CUDA's.
    """

    def __init__(self, device: torch.device, read: Callable[[], MemoryReading] | None = None) -> None:
        if read is None and device.type == "cuda":
            read = lambda: read_cuda_memory(device)  # noqa: E731
        self._read = read
        self._largest = 0
        self._peak = 0

    def largest_micro_batch(self, micro_batch_size: int) -> int:
        """The largest micro-batch that should fit, by a line from what lies there between steps to the peak.

        Args:
            micro_batch_size: samples of the largest micro-batch of the step that was just trained; 0: unknown.

        Returns:
            Samples, at least the largest that was trained; 0 if no limit is known.
        """
        self._largest = max(self._largest, micro_batch_size)
        if self._read is None or self._largest == 0:
            return 0
        memory = self._read()
        # Scripts that log the peak of each step reset it; here it is that of the largest micro-batch.
        self._peak = max(self._peak, memory.peak)
        per_sample = max(self._peak - memory.now, 1) / self._largest
        return max(self._largest, int((USABLE * memory.total - memory.now) / per_sample))
