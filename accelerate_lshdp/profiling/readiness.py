# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""When each bucket of gradients is ready to travel, counted from the start of the forward.

The engine's own order of reductions is used, with a reduction that notes when it is started and mostly sends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from accelerate_lshdp.documents.curves import TimeCurve
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire.formats import wire_bytes
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction


class _CompletedReduction(PendingReduction):
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class RecordingReduction(GradientReduction):
    """Notes when each bucket would begin to travel, and how many bytes it has.

    Attributes:
        sender: what buckets are handed on to; None: they do not travel.

    Args:
        group: the ranks that would share the gradients.
        communication: how they would travel.
        clock: seconds, monotonic; devices with streams are asked for their own time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        communication: Communication,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(group)
        self._communication = communication
        self._clock = clock
        self._began: float | torch.Event = 0.0
        self._start_times: list[float | torch.Event] = []
        self.bucket_bytes: list[int] = []
        self.sender: GradientReduction | None = None

    def begin(self, device: torch.device) -> None:
        """A forward starts now."""
        self._began = self._now(device)
        self._start_times.clear()
        self.bucket_bytes.clear()

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        self._start_times.append(self._now(buffer.device))
        self.bucket_bytes.append(wire_bytes(self._communication, buffer, shapes))
        return _CompletedReduction() if self.sender is None else self.sender.start(buffer, index, shapes)

    def seconds(self) -> list[float]:
        """Seconds from `begin` to the start of each bucket; the device must have been waited for."""
        if isinstance(self._began, float):
            return [start_time - self._began for start_time in self._start_times]
        return [self._began.elapsed_time(start_time) / 1000 for start_time in self._start_times]

    def _now(self, device: torch.device) -> float | torch.Event:
        if device.type == "cpu":
            return float(self._clock())
        event = torch.get_device_module(device).Event(enable_timing=True)
        event.record()
        return event


class ReadyFractions:
    """Which part of a forward and backward is over when each bucket is ready.

    A part of the same run, because runs differ when a machine is disturbed or throttled, and their parts much less.
    """

    def __init__(self) -> None:
        self._fractions: dict[int, list[Sequence[float]]] = {}

    def add(self, size: int, ready: Sequence[float], total: float) -> None:
        """One run: seconds of each bucket, and of the whole forward and backward."""
        self._fractions.setdefault(size, []).append([min(1.0, seconds / total) for seconds in ready])

    def curves(self, seconds: Mapping[int, float]) -> list[TimeCurve]:
        """One curve a bucket, at the sizes of ``seconds`` (of the whole forward and backward).

        Sizes without a run get the parts of their neighbours, on a line between them.

        Raises:
            RuntimeError: runs had different numbers of buckets.
        """
        runs = [run for of_size in self._fractions.values() for run in of_size]
        if len({len(run) for run in runs}) > 1:
            raise RuntimeError(f"found {sorted({len(run) for run in runs})} gradient buckets in different backwards")
        measured = sorted(self._fractions)
        curves = []
        for bucket in range(len(runs[0])):
            parts = [median(run[bucket] for run in self._fractions[size]) for size in measured]
            at_sizes = np.interp(list(seconds), measured, parts)
            ready = [part * whole for part, whole in zip(at_sizes, seconds.values(), strict=True)]
            curves.append(TimeCurve(tuple(seconds), tuple(map(float, ready))))
        return curves


def readiness_order(sizes: Sequence[int]) -> list[int]:
    """The sizes in the order in which to measure them while there is time: the ends first, then the largest."""
    ascending = sorted(sizes)
    return list(dict.fromkeys([ascending[-1], ascending[0], *reversed(ascending)]))
