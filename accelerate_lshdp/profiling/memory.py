# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Meters of the peak memory of a micro-batch, and the memory that is free, in bytes."""

from __future__ import annotations

import resource
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import psutil
import torch
from accelerate.logging import get_logger

from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.runtime.device_memory import counts_memory


logger = get_logger(__name__)


class MemoryMeter(ABC):
    """The peak of this rank's memory since the last `restart`, in bytes."""

    @abstractmethod
    def restart(self) -> None:
        """Begins a new peak."""

    @abstractmethod
    def peak(self) -> int:
        """The largest number of bytes in use since `restart`."""

    @abstractmethod
    def default_limit(self, local_ranks: int) -> int:
        """Bytes that this rank may use in all if the user gives no limit and ``local_ranks`` ranks share the node."""


class DeviceMeter(MemoryMeter):
    """The memory of a device, as its caching allocator counts it.

    Args:
        device: of a type that `counts_memory`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = torch.get_device_module(device)

    def restart(self) -> None:
        self._counts.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return self._counts.max_memory_allocated(self._device)

    def default_limit(self, local_ranks: int) -> int:
        # What the allocator has reserved is used by this process, but free for the next micro-batch.
        free, _ = self._counts.mem_get_info(self._device)
        return free + self._counts.memory_reserved(self._device)


class ResidentMeter(MemoryMeter):
    """The resident memory of this process, Python and libraries included.

    Linux can restart the peak that it keeps (``VmHWM``). Where it does not let us (`restarts` is False), the peak is
    that of the whole process; measured in the order of growing micro-batches it is then never too small.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._process = process
        self.restarts = self._restarted()

    def _restarted(self) -> bool:
        try:
            # 5: reset VmHWM to the present resident size (proc(5), Linux 4.0 on).
            (self._process / "clear_refs").write_text("5")
            return self._high_water() is not None
        except OSError:
            return False

    def _high_water(self) -> int | None:
        for line in (self._process / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # the file says kB
        return None

    def restart(self) -> None:
        if self.restarts:
            self._restarted()

    def peak(self) -> int:
        if self.restarts:
            return self._high_water()
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, kilobytes on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def default_limit(self, local_ranks: int) -> int:
        free = psutil.virtual_memory().available
        in_group = free_in_control_group()
        return psutil.Process().memory_info().rss + min(free, free if in_group is None else in_group) // local_ranks


def meter_of(device: torch.device) -> MemoryMeter | None:
    """The meter of a device's memory; None: there is none for this kind of device."""
    if device.type != "cpu":
        return DeviceMeter(device) if counts_memory(device) else None
    meter = ResidentMeter()
    if not meter.restarts:
        logger.warning(
            "this system does not restart the peak of a process's memory, so what is reported for small micro-batches "
            "is at least what this process has ever used"
        )
    return meter


def process_bytes(meter: MemoryMeter, model: torch.nn.Module, device: torch.device) -> int:
    """Bytes that this process has in use beside a model in host memory, which is not placed yet."""
    meter.restart()
    # On CPUs the model is a part of the process.
    tensors = [*parameters_of(model), *model.buffers()] if device.type == "cpu" else []
    return max(0, meter.peak() - sum(tensor.nbytes for tensor in tensors))


def free_in_control_group(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self")) -> int | None:
    """Free bytes of this process's control group; None: it has no limit.

    Files that the system keeps in memory count as free: it drops them when memory is needed.
    """
    # Lines are "id:controllers:path"; version 2 has one line without controllers. Of several limits
    # the smallest one counts.
    free = []
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        names = {"": (".", "memory.max", "memory.current")}
        names["memory"] = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        for controller in set(controllers.split(",")) & names.keys():
            folder, limit, usage = names[controller]
            # A group's limit holds for the groups inside it. In a container the path may be that of the host, where
            # only the mount itself exists.
            own = root / folder / path.lstrip("/")
            for place in (own, *(around for around in own.parents if around.is_relative_to(root / folder))):
                numbers = [text for name in (limit, usage) for text in _lines(place / name)[:1]]
                if len(numbers) == 2 and all(number.isdigit() for number in numbers):
                    statistics = dict(entry.split() for entry in _lines(place / "memory.stat"))
                    kept_files = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
                    free.append(max(0, int(numbers[0]) - int(numbers[1]) + kept_files))
    return min(free, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
