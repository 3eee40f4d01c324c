# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`RankSession`: the measurements of one rank: micro-batch sizes, memory, seconds, buckets, and the optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_lshdp.documents.curves import MemoryCurve, TimeCurve
from accelerate_lshdp.profiling.memory import MemoryMeter
from accelerate_lshdp.profiling.noise import significant_median
from accelerate_lshdp.profiling.probing import (
    NothingFits,
    OutOfMemory,
    SearchLimits,
    SizeSearch,
    Trial,
    find_sizes,
    with_margin,
)
from accelerate_lshdp.profiling.readiness import ReadyFractions, RecordingReduction, readiness_order
from accelerate_lshdp.profiling.rehearsal import Rehearsal, ShardReduction
from accelerate_lshdp.profiling.rehearsed_rank import RehearsedStep
from accelerate_lshdp.profiling.repeats import LEAST_REPEATS, LEAST_SECONDS, Repeats, measure_repeatedly
from accelerate_lshdp.profiling.single_rank import SingleRankTrainer
from accelerate_lshdp.profiling.subject import Samples


_READY_ROUNDS = 3
_ACCUMULATION_ROUNDS = 5
# Fraction of the remaining seconds of the phase for these rounds.
_ACCUMULATION_PART = 1 / 3


class OtherRankFailed(Exception):
    """Raised to end the measurements of a rank early, because another rank has failed."""


@dataclass(frozen=True)
class MeasurementContext:
    """The functions by which a rank's measurements depend on the run and on other ranks.

    Args:
        remaining: returns the seconds left of the current phase.
        others_measure: posts that this rank's times are quiet; returns whether another rank's are not.
        another_failed: returns whether another rank has failed.
        on_measurement: called after each measurement.
        clock: seconds, monotonic.
    """

    remaining: Callable[[], float]
    others_measure: Callable[[], bool] = lambda: False
    another_failed: Callable[[], bool] = lambda: False
    on_measurement: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds of the calling thread (`own`) and of the other threads of the process (`others`)."""

    own: float
    others: float

    @classmethod
    def now(cls) -> CpuTime:
        own = time.thread_time()
        return cls(own, time.process_time() - own)

    def __sub__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.own - other.own, self.others - other.others)


class RankSession:
    """Measures one rank: `warm_up`, `find`, `repeat`, `accumulation_overhead` and `full_steps`, in this order.

    Args:
        rank: trains the micro-batches.
        samples: the data of the micro-batches.
        meter: measures memory; None: memory is not measured.
        recorder: gets the gradient buckets of ``rank``; None: there are none.
        context: limits of time, and the other ranks.
    """

    def __init__(
        self,
        rank: SingleRankTrainer,
        samples: Samples,
        meter: MemoryMeter | None,
        recorder: RecordingReduction | None,
        context: MeasurementContext,
    ) -> None:
        self._rank = rank
        self._samples = samples
        self._meter = meter
        self._recorder = recorder
        self._context = context
        self._base_bytes = 0

    def warm_up(self) -> None:
        """Trains on one sample, so that gradients, optimizer state and kernels are allocated and compiled.

        Raises:
            NothingFits: there is no sample, or not enough memory for one.
        """
        if not self._samples.available(1):
            raise NothingFits("found no sample in the data set, expected at least one")
        try:
            self._first_steps()
        except Exception as error:
            if _is_out_of_memory(error):
                raise NothingFits(f"a micro-batch of one sample does not fit the memory ({error})") from error
            raise

    def _first_steps(self) -> None:
        self._train(self._rank.to_device(self._samples.batch(1)), synchronise=True)
        self._rank.step()
        self._restart_meter()
        # A step with state and gradients, without activations: its peak is the least that any micro-batch needs.
        self._rank.step()
        self._rank.synchronise()
        self._base_bytes = self._meter.peak() if self._meter is not None else 0
        self._rank.drop_gradients()

    def find(self, max_batch: int | None, needed_batch: int, memory_bytes: int | None) -> SizeSearch:
        """The micro-batch sizes that this rank can train on, with their first measurements.

        Raises:
            NothingFits: as `find_sizes`.
        """
        limits = SearchLimits(
            self._samples.available,
            self._context.remaining,
            measurements=LEAST_REPEATS,
            least_seconds=LEAST_SECONDS,
            max_batch=max_batch,
            needed_batch=needed_batch,
            memory_bytes=memory_bytes,
            base_bytes=self._base_bytes,
        )
        return find_sizes(self._attempt, limits)

    def memory(self, found: SizeSearch) -> MemoryCurve | None:
        """The peak bytes of each size, `MEMORY_MARGIN` above the measured ones; None if memory is not measured."""
        if self._meter is None:
            return None
        peaks = [with_margin(max(trial.peak_bytes, self._base_bytes)) for trial in found.trials.values()]
        return MemoryCurve(tuple(found.trials), tuple(peaks))

    def _attempt(self, size: int) -> Trial:
        """Measures two accumulated micro-batches: the second one needs the memory of the first one's gradients, too.

        Raises:
            OutOfMemory: they do not fit.
        """
        self._stop_if_another_failed()
        batch = self._rank.to_device(self._samples.batch(size))
        self._restart_meter()
        try:
            self._train(batch)
            seconds = self._train(batch, synchronise=True)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            seconds = None
        del batch
        if seconds is None:  # outside of the handler, whose traceback keeps the tensors that did not fit
            self._rank.recover()
            raise OutOfMemory
        peak = self._meter.peak() if self._meter is not None else None
        self._rank.drop_gradients()
        self._context.on_measurement()
        return Trial(seconds, peak)

    def repeat(self, found: SizeSearch) -> dict[int, Repeats]:
        """Measures all sizes again until they are quiet or the phase is over."""

        def run(size: int, count: int) -> float:
            self._stop_if_another_failed()
            batch = self._rank.to_device(self._samples.batch(size))
            began = self._now()
            for _ in range(count):
                self._rank.train(batch)
                self._rank.drop_gradients()
            seconds = self._now() - began
            self._context.on_measurement()
            return seconds

        return measure_repeatedly(
            run,
            {size: trial.seconds for size, trial in found.trials.items()},
            remaining=self._context.remaining,
            others_measure=self._context.others_measure,
        )

    def accumulation_overhead(self, seconds: dict[int, float]) -> float:
        """Seconds that a micro-batch takes longer when it adds its gradients to those of another one.

        They do not depend on the size of the micro-batch, so they are measured at the smallest one.

        Args:
            seconds: measured seconds of a micro-batch of each size.
        """
        size = min(seconds)
        batch = self._rank.to_device(self._samples.batch(size))
        count = math.ceil(LEAST_SECONDS / seconds[size])
        least_left = (1 - _ACCUMULATION_PART) * self._context.remaining()
        differences: list[float] = []
        while len(differences) < _ACCUMULATION_ROUNDS:
            if differences and self._context.remaining() < least_left:
                break
            self._stop_if_another_failed()
            difference = 0.0
            for _ in range(count):
                self._rank.drop_gradients()
                # Neighbours: the first one makes new gradients, the second one adds to them.
                difference -= self._train(batch)
                difference += self._train(batch)
            differences.append(difference / count)
            self._context.on_measurement()
        self._rank.drop_gradients()
        return max(0.0, significant_median(differences, seconds[size]))

    def full_steps(self, seconds: dict[int, float]) -> tuple[float, list[TimeCurve], list[int]]:
        """Optimizer seconds, one curve of ready seconds for each bucket, and the bytes of each bucket.

        Args:
            seconds: measured seconds of a micro-batch of each size.
        """
        fractions, steps = ReadyFractions(), []
        for place, size in enumerate(readiness_order(list(seconds)) * _READY_ROUNDS):
            if place and seconds[size] > self._context.remaining():
                continue
            self._stop_if_another_failed()
            self._rank.drop_gradients()
            total = self._train(self._rank.to_device(self._samples.batch(size)), synchronise=True)
            if self._recorder is not None:
                fractions.add(size, self._recorder.seconds(), total)
            steps.append(self._step_seconds(1))
            self._context.on_measurement()
        # The gradients of the last round are still there, so the optimizer has something to do.
        repeats = measure_repeatedly(
            lambda _, count: self._step_seconds(count), {0: min(steps)}, remaining=self._context.remaining
        )
        self._rank.drop_gradients()
        if self._recorder is None:
            return repeats[0].median, [], []
        return repeats[0].median, fractions.curves(seconds), list(self._recorder.bucket_bytes)

    def rehearse(self, rehearsal: Rehearsal, sender: ShardReduction) -> list[RehearsedStep]:
        """Measures pairs of a micro-batch that sends nothing and one that sends its gradients (collective).

        Args:
            rehearsal: the micro-batch size and the number of steps, which is the same on all ranks.
            sender: sends gradients as a real run does.
        """
        size = rehearsal.micro_batch_size
        batch = self._rank.to_device(self._samples.batch(size))
        steps: list[RehearsedStep] = []
        # In turns, so that whatever slows the machine meets both kinds alike.
        for _ in range(1 + rehearsal.steps):
            self._stop_if_another_failed()
            self._rank.drop_gradients()
            begun = CpuTime.now()
            alone = self._train(batch)
            alone_cpu = CpuTime.now() - begun
            self._rank.drop_gradients()
            # Both clocks are emptied, so that below they hold this step's waits only.
            self._rank.clock.take()
            sender.polling_cpu_seconds()
            self._recorder.sender = sender
            begun = CpuTime.now()
            try:
                sending = self._train(batch, synchronise=True) - self._rank.clock.take()
            finally:
                self._recorder.sender = None
            added = CpuTime.now() - begun - alone_cpu
            steps.append(
                RehearsedStep(
                    size,
                    alone,
                    sending,
                    compute_only_cpu_seconds=alone_cpu.own + alone_cpu.others,
                    added_cpu_seconds=added.own - sender.polling_cpu_seconds(),
                    other_threads_cpu_seconds=added.others,
                )
            )
            self._context.on_measurement()
        self._rank.drop_gradients()
        return steps[1:]  # in the first step connections are made

    def _train(self, batch: Any, *, synchronise: bool = False) -> float:
        """Trains a micro-batch that is already on the device; returns its seconds."""
        began = self._now()
        if synchronise and self._recorder is not None:
            self._recorder.begin(self._rank.device)
        self._rank.train(batch, synchronise=synchronise)
        return self._now() - began

    def _step_seconds(self, count: int) -> float:
        """Seconds of `count` optimizer steps."""
        began = self._now()
        for _ in range(count):
            self._rank.step()
        return self._now() - began

    def _now(self) -> float:
        self._rank.synchronise()
        return self._context.clock()

    def _restart_meter(self) -> None:
        if self._meter is not None:
            self._meter.restart()

    def _stop_if_another_failed(self) -> None:
        """Raises OtherRankFailed if another rank has failed."""
        if self._context.another_failed():
            raise OtherRankFailed


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # What torch raises for host memory has no class of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
