# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Seconds from the start of the forward until each bucket of gradients is ready to travel.

The engine starts its reductions in its own order; a `RecordingReduction` takes their place and records the times.
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
    """A reduction that sends nothing and is done at once."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class RecordingReduction(GradientReduction):
    """A reduction that records the seconds at which each bucket begins to travel, and its bytes on the wire.

    Args:
        group: the ranks that would share the gradients.
        communication: the format in which gradients would travel.
        clock: seconds, monotonic, of buckets in host memory; those on devices with streams record events instead.

    Attributes:
        bucket_bytes: bytes on the wire of each bucket since `begin`.
        sender: the reduction that sends the buckets; None: nothing is sent.
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
        self._began = 0.0
        self._began_on_device: torch.Event | None = None
        self._start_times: list[float | torch.Event] = []
        self.bucket_bytes: list[int] = []
        self.sender: GradientReduction | None = None

    def begin(self, device: torch.device) -> None:
        """Begins a recording: a forward starts now on `device`, which has nothing else to do."""
        # Both: gradients of parameters that are streamed are in host memory when they travel.
        self._began = float(self._clock())
        self._began_on_device = None if device.type == "cpu" else _event(device)
        self._start_times.clear()
        self.bucket_bytes.clear()

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        on_host = buffer.device.type == "cpu"
        self._start_times.append(float(self._clock()) if on_host else _event(buffer.device))
        self.bucket_bytes.append(wire_bytes(self._communication, buffer, shapes))
        return _CompletedReduction() if self.sender is None else self.sender.start(buffer, index, shapes)

    def seconds(self) -> list[float]:
        """Seconds from `begin` to the start of each bucket; the device must be synchronised before."""
        return [
            # Events count milliseconds.
            start - self._began if isinstance(start, float) else self._began_on_device.elapsed_time(start) / 1000
            for start in self._start_times
        ]


def _event(device: torch.device) -> torch.Event:
    # The host runs ahead of a device with streams: an event in its queue has the time that counts.
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


class ReadyFractions:
    """The fraction of a forward and backward that is over when each bucket is ready.

    A fraction of the same run, as the seconds of runs differ on a disturbed or throttled machine, their fractions much
    less.
    """

    def __init__(self) -> None:
        self._fractions: dict[int, list[Sequence[float]]] = {}

    def add(self, size: int, ready: Sequence[float], total: float) -> None:
        """Adds one run with micro-batches of `size` samples.

        Args:
            size: samples of the micro-batch.
            ready: seconds until each bucket was ready.
            total: seconds of the whole forward and backward.
        """
        self._fractions.setdefault(size, []).append([min(1.0, seconds / total) for seconds in ready])

    def curves(self, seconds: Mapping[int, float]) -> list[TimeCurve]:
        """One curve of seconds for each bucket, at the sizes of ``seconds``.

        Sizes without a run get fractions that are interpolated between their neighbours.

        Args:
            seconds: seconds of the whole forward and backward at each size.

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
    """The sizes in the order in which to measure them while there is time: both ends first, then from the largest."""
    ascending = sorted(sizes)
    return list(dict.fromkeys([ascending[-1], ascending[0], *reversed(ascending)]))
