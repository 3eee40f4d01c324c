# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The largest micro-batch that fits the memory of a device, judged from those that were trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from accelerate_lshdp.runtime.device_memory import counts_memory


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


def read_memory(device: torch.device) -> MemoryReading:
    """What torch says of a device; memory of other processes does not count as usable."""
    counts = torch.get_device_module(device)
    free, _ = counts.mem_get_info(device)
    return MemoryReading(
        total=free + counts.memory_reserved(device),
        peak=counts.max_memory_allocated(device),
        now=counts.memory_allocated(device),
    )


class DeviceMemory:
    """Watches what training needs, to say how large a micro-batch may become.

    Args:
        device: where the forward runs. On a CPU no limit is known: its memory is shared with everything else.
        read: gives the present bytes; default: torch's, of devices whose memory it counts.
    """

    def __init__(self, device: torch.device, read: Callable[[], MemoryReading] | None = None) -> None:
        if read is None and counts_memory(device):
            read = functools.partial(read_memory, device)
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
