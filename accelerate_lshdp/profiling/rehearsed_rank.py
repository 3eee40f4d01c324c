# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`RehearsedRank`: corrects a rank's measured times by steps that all ranks trained at the same time.

The difference of two neighbouring micro-batches, one that sends its gradients and one that does not, is the time that
sending takes, whatever else made the machine faster or slower since the curve was measured.

A rank that waits for others does part of the work of sending while it waits, so its seconds do not show that part;
under another plan others may wait for this rank. Where a control group limits the rank's CPU time, the CPU seconds of
sending are counted instead, whether the rank waits or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from accelerate_lshdp.documents.profile_sections import MeasuredRank
from accelerate_lshdp.profiling.noise import significant_median


# Fraction of its CPU limit that a rank must use while it computes; below it the limit does not slow it down.
_LIMITED = 0.6


@dataclass(frozen=True)
class RehearsedStep:
    """Forward and backward of one micro-batch, without sending and again with it.

    Args:
        micro_batch_size: samples of the micro-batch.
        compute_only_seconds: seconds without sending.
        sending_seconds: seconds with sending, without those in which the rank waited.
        compute_only_cpu_seconds: CPU seconds of all threads without sending.
        added_cpu_seconds: CPU seconds that sending adds to the thread that computes, without those of waiting.
        other_threads_cpu_seconds: CPU seconds that sending takes in other threads, also while the rank waits.
    """

    micro_batch_size: int
    compute_only_seconds: float
    sending_seconds: float
    compute_only_cpu_seconds: float = 0.0
    added_cpu_seconds: float = 0.0
    other_threads_cpu_seconds: float = 0.0


class RehearsedRank:
    """One rank's measurements, corrected by all of its rehearsals.

    Args:
        measured: the rank as it was measured by itself.
        cores: CPU seconds per second that a control group gives the rank, if computing can use them up; None: no limit
            slows the rank down.
    """

    def __init__(self, measured: MeasuredRank, cores: float | None) -> None:
        self._measured = measured
        self._cores = cores
        self._all_steps: list[RehearsedStep] = []
        self._steps: list[RehearsedStep] = []
        self._load = -math.inf

    def learn(self, everyone: Sequence[Sequence[RehearsedStep]]) -> MeasuredRank:
        """The corrected rank after one more rehearsal.

        Args:
            everyone: the steps of each rank; those of one rank have the same micro-batch.

        The curve is scaled to what the steps of all rehearsals took without sending: the machine may be slower than
        before, and ranks that share it were in each other's way while all of them measured without a pause. All ranks
        rehearse at the same time: a machine that is slow at times does not make some look slower than others.
        """
        steps = everyone[self._measured.rank]
        self._steps += steps
        self._all_steps += chain.from_iterable(everyone)
        # The largest load of all rehearsals: a rank that others wait for shows its whole load, one that waits for
        # others hides part of it.
        self._load = load = max(self._load, self._measured_load(steps))
        if self._cores is not None and _rate(self._steps) >= _LIMITED * self._cores:
            load = max(load, load_from_cpu_seconds(self._steps, self._all_steps))
        return self._at_speed(load)

    def _measured_load(self, steps: Sequence[RehearsedStep]) -> float:
        """Seconds that sending adds to a step; 0 if chance explains them, negative if steps are shorter with it."""
        expected = self._measured.time(steps[0].micro_batch_size)
        return significant_median([step.sending_seconds - step.compute_only_seconds for step in steps], expected)

    def _at_speed(self, load: float) -> MeasuredRank:
        """The rank with this load in seconds, and its curve at the speed of the rehearsed steps."""

        def slowdown(step: RehearsedStep) -> float:
            # Steps that are shorter with sending are what the rank can do.
            seconds = min(step.compute_only_seconds, step.sending_seconds) if load < 0 else step.compute_only_seconds
            return seconds / self._measured.time(step.micro_batch_size)

        learned = replace(self._measured, communication_load_seconds=max(0.0, load))
        return learned.slowed_down(median(map(slowdown, self._steps)))


def load_from_cpu_seconds(steps: Sequence[RehearsedStep], everyone: Sequence[RehearsedStep]) -> float:
    """Seconds that sending adds to the steps of a rank whose computing uses up its CPU limit.

    They are the CPU seconds of sending divided by the CPU seconds per second that the rank gets. That rate may be
    below its limit, where nodes are emulated on a machine that has less than all limits together.

    Args:
        steps: steps of this rank, with any micro-batches.
        everyone: steps of all ranks.
    """
    # CPU seconds of other threads are read exactly. What sending adds to the computing thread is a small difference of
    # long times, so it is taken in proportion to them, as the median ratio over the steps of all ranks.
    shares = [
        step.added_cpu_seconds / step.other_threads_cpu_seconds
        for step in everyone
        if step.other_threads_cpu_seconds > 0
    ]
    beside = max(0.0, median(step.other_threads_cpu_seconds for step in steps))
    return beside * (1 + max(0.0, median(shares or [0.0]))) / _rate(steps)


def _rate(steps: Sequence[RehearsedStep]) -> float:
    """CPU seconds per second that the rank gets while it computes: the median of its steps."""
    return median(step.compute_only_cpu_seconds / step.compute_only_seconds for step in steps)
