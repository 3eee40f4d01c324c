# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How long the last steps took, and how long each rank computed and waited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from accelerate_lshdp.runtime.step_exchange import RankReport
from accelerate_lshdp.runtime.wait_clock import WaitClock


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Medians over the last optimizer steps.

    Attributes:
        seconds: wall seconds of a step on this rank, from one optimizer step to the next.
        compute_seconds: seconds of forward and backward without communication, one entry a rank.
        wait_seconds: seconds blocked in communication, which is waiting for slower ranks too, one entry a rank.
        optimizer_seconds: seconds of the optimizer step, one entry a rank.
        data_seconds: seconds of waiting for batches, one entry a rank.
        idle_fraction: ``1 - mean(compute_seconds) / max(compute_seconds)``.
        samples_per_second: samples of all ranks over ``seconds``.
        steps: number of steps the medians are over.
    """

    seconds: float
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]
    data_seconds: tuple[float, ...]
    idle_fraction: float
    samples_per_second: float
    steps: int


@dataclass(slots=True)
class _Step:
    seconds: float
    reports: tuple[RankReport, ...]
    samples: int


class _HostMoments:
    """Moments of a rank that computes on the host: what was called before has been computed."""

    is_device = False

    def mark(self) -> float:
        return time.perf_counter()

    def reach(self, moment: float) -> None:
        return

    def between(self, begin: float, end: float) -> float:
        return end - begin


class _DeviceMoments:
    """Moments of what a device computes, which runs behind the host: events in its stream.

    Communication, and copies to the host, are in streams of their own. The computing one waits for them when a
    backward is finished, so a moment before that is reached whatever other ranks do.
    """

    is_device = True

    def __init__(self, device: torch.device) -> None:
        self._streams = torch.get_device_module(device)

    def mark(self) -> Any:
        event = self._streams.Event(enable_timing=True)
        event.record()
        return event

    def reach(self, moment: Any) -> None:
        moment.synchronize()

    def between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000


class StepTimer:
    """Measures steps: the accelerator tells it when forwards, backwards and optimizer steps begin and end.

    Where the host runs ahead of the device, the computing stream is waited for at the end of a backward: once a
    micro-batch.

    Args:
        device: where the forward runs.
        clock: seconds blocked in communication.
        history: number of steps kept.
    """

    def __init__(self, device: torch.device, clock: WaitClock, history: int = 50) -> None:
        self.device = device
        self.clock = clock
        self.samples = 0
        self._moments = _HostMoments() if device.type == "cpu" else _DeviceMoments(device)
        if self._moments.is_device:
            clock.moments = self._moments
        self._steps: deque[_Step] = deque(maxlen=history)
        self._begun: float | None = None
        self._forward: Any = None
        self._ended: Any = None  # of the last backward
        self._compute = 0.0
        self._waited = 0.0
        self._exchanged = 0.0  # of the wait, what the exchange after this step's backward took
        self._exchanged_before = 0.0  # and the one of the step before, which this step's report tells
        # Of a device: from the end of each backward until its gradients were there. Read when they have passed.
        self._exchanges: list[tuple[Any, Any]] = []
        self._exchanges_before: list[tuple[Any, Any]] = []
        self._data = 0.0
        self._optimizing: Any = None
        self._optimizer = 0.0
        self._optimizer_steps: list[tuple[Any, Any]] = []  # whose seconds are not in `_optimizer` yet
        self._reports: tuple[RankReport, ...] | None = None

    def forward_begins(self) -> None:
        """A training forward begins; everything until the end of its backward counts as computing or waiting."""
        if self._forward is None:
            self._forward = self._moments.mark()
            self.clock.clear()
        if self._begun is None:
            self._begun = time.perf_counter()

    def fetched(self, seconds: float) -> None:
        """The script has waited so long for a batch."""
        self._data += seconds

    def backward_ends(self) -> RankReport:
        """What is told of this rank: its seconds since the last optimizer step, this backward included.

        The seconds of that step itself, and of the exchange before it, are known only now.
        """
        if self._forward is not None:
            self._ended = self._moments.mark()
            self._moments.reach(self._ended)
            waited = self.clock.take()
            self._compute += max(0.0, self._moments.between(self._forward, self._ended) - waited)
            self._waited += waited
            self._forward = None
        self._optimizer += self._seconds_of(self._optimizer_steps)
        self._exchanged_before += self._seconds_of(self._exchanges_before)
        return RankReport(self._compute, self._waited + self._exchanged_before, self._optimizer, self._data)

    def _seconds_of(self, spans: list[tuple[Any, Any]]) -> float:
        """The seconds of some spans, which are taken out of the list."""
        for _, end in spans:
            self._moments.reach(end)
        seconds = sum(self._moments.between(begin, end) for begin, end in spans)
        spans.clear()
        return seconds

    def take_reports(self, reports: Sequence[RankReport]) -> None:
        """What all ranks reported for this step; until they had, this rank may have waited for others."""
        if self._moments.is_device and self._ended is not None:
            # All that the device had nothing to do, also where the host did not wait for it.
            self.clock.clear()
            self._exchanges.append((self._ended, self._moments.mark()))
            self._ended = None
        else:
            self._exchanged += self.clock.take()
        self._reports = tuple(reports)

    def optimizer_begins(self) -> None:
        """An optimizer is about to step."""
        if self._reports is not None:  # the first optimizer of a step; a second one adds to it
            self._optimizer = 0.0
            self._optimizer_steps.clear()
        self._optimizing = self._moments.mark()

    def step_ends(self) -> None:
        """The optimizer has stepped."""
        now = time.perf_counter()
        if self._optimizing is not None:
            self._optimizer_steps.append((self._optimizing, self._moments.mark()))
            self._optimizing = None
        if self._begun is not None and self._reports is not None:
            self._steps.append(_Step(now - self._begun, self._reports, self.samples))
        if self._reports is not None:
            self._exchanged_before, self._exchanged = self._exchanged, 0.0
            self._exchanges_before, self._exchanges = self._exchanges, []
        self._begun = now
        self._compute = self._waited = self._data = 0.0
        self._reports = None
        self.samples = 0

    def interrupt(self) -> None:
        """Something else than training follows (an evaluation pass): the next step begins with its first forward."""
        self._begun = None

    def statistics(self) -> StepStatistics | None:
        """Medians over the steps kept; None before the first step."""
        steps = list(self._steps)
        if not steps:
            return None
        seconds = median(step.seconds for step in steps)
        ranks = list(zip(*(step.reports for step in steps), strict=True))
        compute = tuple(median(report.compute_seconds for report in reports) for reports in ranks)
        slowest = max(compute)
        return StepStatistics(
            seconds=seconds,
            compute_seconds=compute,
            wait_seconds=tuple(median(report.wait_seconds for report in reports) for reports in ranks),
            optimizer_seconds=tuple(median(report.optimizer_seconds for report in reports) for reports in ranks),
            data_seconds=tuple(median(report.data_seconds for report in reports) for reports in ranks),
            idle_fraction=1 - sum(compute) / len(compute) / slowest if slowest > 0 else 0.0,
            samples_per_second=median(step.samples for step in steps) / seconds,
            steps=len(steps),
        )
