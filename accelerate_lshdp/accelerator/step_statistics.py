"""How long the last steps took, and how long each rank computed and waited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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


class StepTimer:
    """Measures steps: the accelerator tells it when forwards, backwards and optimizer steps begin and end.

    Where the host runs ahead of the device, the device is waited for at the end of a backward, before the clock is
    read: once a micro-batch.

    Args:
        device: where the forward runs.
        clock: seconds blocked in communication.
        history: number of steps kept.
    """

    def __init__(self, device: torch.device, clock: WaitClock, history: int = 50) -> None:
        self.device = device
        self.clock = clock
        self.samples = 0
        self._steps: deque[_Step] = deque(maxlen=history)
        self._begun: float | None = None
        self._forward: float | None = None
        self._compute = 0.0
        self._waited = 0.0
        self._exchanged = 0.0  # of the wait, what the exchange after this step's backward took
        self._exchanged_before = 0.0  # and the one of the step before, which this step's report tells
        self._data = 0.0
        self._optimizing: float | None = None
        self._optimizer = 0.0
        self._reports: tuple[RankReport, ...] | None = None

    def forward_begins(self) -> None:
        """A training forward begins; everything until the end of its backward counts as computing or waiting."""
        if self._forward is None:
            self._forward = time.perf_counter()
            self.clock.take()
        if self._begun is None:
            self._begun = self._forward

    def fetched(self, seconds: float) -> None:
        """The script has waited so long for a batch."""
        self._data += seconds

    def backward_ends(self) -> RankReport:
        """What is told of this rank: its seconds since the last optimizer step, this backward included.

        The seconds of that step itself, and of the exchange before it, are known only now.
        """
        if self._forward is not None:
            if self.device.type != "cpu":
                torch.get_device_module(self.device).synchronize(self.device)
            waited = self.clock.take()
            self._compute += max(0.0, time.perf_counter() - self._forward - waited)
            self._waited += waited
            self._forward = None
        return RankReport(self._compute, self._waited + self._exchanged_before, self._optimizer, self._data)

    def take_reports(self, reports: Sequence[RankReport]) -> None:
        """What all ranks reported for this step; until they had, this rank may have waited for others."""
        self._exchanged += self.clock.take()
        self._reports = tuple(reports)

    def optimizer_begins(self) -> None:
        """An optimizer is about to step."""
        if self._reports is not None:
            self._optimizer = 0.0  # the first optimizer of a step; a second one adds to it
        self._optimizing = time.perf_counter()

    def step_ends(self) -> None:
        """The optimizer has stepped."""
        now = time.perf_counter()
        if self._optimizing is not None:
            self._optimizer += now - self._optimizing
            self._optimizing = None
        if self._begun is not None and self._reports is not None:
            self._steps.append(_Step(now - self._begun, self._reports, self.samples))
        if self._reports is not None:
            self._exchanged_before, self._exchanged = self._exchanged, 0.0
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
