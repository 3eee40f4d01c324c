# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a rank's forward and backward take in real steps, beside what it measured by itself.

The difference of two neighbours, a step that sends and one that does not, is what sending takes, whatever else made
the machine faster or slower since the curve was measured.

A rank that waits for others does part of that work while it waits, where its seconds do not show it, and another plan
may make others wait for this rank. Where a control group limits a rank's CPU time, that is no question: what sending
takes of that time is counted, waiting or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from accelerate_lshdp.documents.profile_sections import MeasuredRank
from accelerate_lshdp.profiling.noise import significant_median


# A rank that uses less of its limit while it computes waits for something else, or sleeps.
_LIMITED = 0.6


@dataclass(frozen=True)
class RehearsedStep:
    """Forward and backward of one micro-batch, without sending and again with it.

    Args:
        micro_batch_size: its samples.
        compute_only_seconds: without sending.
        sending_seconds: with sending; what the rank waited is not in them.
        compute_only_cpu_seconds: of all threads, without sending.
        added_cpu_seconds: what sending added to those of the thread that computes, waiting aside.
        other_threads_cpu_seconds: what it took of other threads, also while the rank waited.
    """

    micro_batch_size: int
    compute_only_seconds: float
    sending_seconds: float
    compute_only_cpu_seconds: float = 0.0
    added_cpu_seconds: float = 0.0
    other_threads_cpu_seconds: float = 0.0


class RehearsedRank:
    """One rank, as all its rehearsals show it.

    Args:
        measured: the rank as it measured itself.
        cores: CPU seconds per second that a control group gives it, if computing alone can use them; None: it can use
            no more than it has.
    """

    def __init__(self, measured: MeasuredRank, cores: float | None) -> None:
        self._measured = measured
        self._cores = cores
        self._all_steps: list[RehearsedStep] = []
        self._steps: list[RehearsedStep] = []
        self._load = -math.inf

    def learn(self, everyone: Sequence[Sequence[RehearsedStep]]) -> MeasuredRank:
        """The rank after one more rehearsal: the steps of each rank, all of one rank with the same micro-batch.

        The curve is scaled to what the steps of all rehearsals took without sending: the machine may be slower than
        before, and ranks that share it were in each other's way while all of them measured without a pause. All ranks
        rehearse at the same time: a machine that is slow at times does not make some look slower than others.
        """
        steps = everyone[self._measured.rank]
        self._steps += steps
        self._all_steps += chain.from_iterable(everyone)
        # A rank that others wait for shows it; one that waits does that work meanwhile.
        self._load = load = max(self._load, self._measured_load(steps))
        if self._cores is not None and _rate(self._steps) >= _LIMITED * self._cores:
            load = max(load, load_from_cpu_seconds(self._steps, self._all_steps))
        return self._at_speed(load)

    def _measured_load(self, steps: Sequence[RehearsedStep]) -> float:
        """What sending adds to steps, more than chance; negative if they are shorter with it."""
        expected = self._measured.time(steps[0].micro_batch_size)
        return significant_median([step.sending_seconds - step.compute_only_seconds for step in steps], expected)

    def _at_speed(self, load: float) -> MeasuredRank:
        def slowdown(step: RehearsedStep) -> float:
            # Steps that are shorter with sending are what the rank can do.
            seconds = min(step.compute_only_seconds, step.sending_seconds) if load < 0 else step.compute_only_seconds
            return seconds / self._measured.time(step.micro_batch_size)

        learned = replace(self._measured, communication_load_seconds=max(0.0, load))
        return learned.slowed_down(median(map(slowdown, self._steps)))


def load_from_cpu_seconds(steps: Sequence[RehearsedStep], everyone: Sequence[RehearsedStep]) -> float:
    """Seconds that sending takes of a rank whose computing uses all CPU seconds that it gets.

    What sending takes of them, computing has to wait for, at the rate at which the rank gets them. That may be less
    than its limit: where nodes are emulated on one machine, it has less to give than all limits together.

    Args:
        steps: of this rank, with any micro-batches.
        everyone: those of all ranks.
    """
    # Threads beside the computing one are read exactly. What they add to its own time by being in its way is a small
    # difference of long times: in proportion to theirs, for which the steps of all ranks count.
    shares = [
        step.added_cpu_seconds / step.other_threads_cpu_seconds
        for step in everyone
        if step.other_threads_cpu_seconds > 0
    ]
    beside = max(0.0, median(step.other_threads_cpu_seconds for step in steps))
    return beside * (1 + max(0.0, median(shares or [0.0]))) / _rate(steps)


def _rate(steps: Sequence[RehearsedStep]) -> float:
    """CPU seconds per second of computing."""
    return median(step.compute_only_cpu_seconds / step.compute_only_seconds for step in steps)
