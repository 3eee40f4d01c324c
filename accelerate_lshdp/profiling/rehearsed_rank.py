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

from accelerate_lshdp.profiling.measured import MeasuredRank


# A difference counts if it is more than the standard error of the median: on a busy machine steps differ anyway. For
# normal noise that is 1.25 * 1.48 median absolute deviations, by the root of the number of steps.
_SIGNIFICANCE = 1.25 * 1.48
_NEGLIGIBLE = 0.01
# A rank that uses less of its limit while it computes waits for something else, or sleeps.
_LIMITED = 0.6


@dataclass(frozen=True)
class RehearsedStep:
    """Forward and backward of one micro-batch, without sending and again with it.

    Args:
        micro_batch_size: its samples.
        alone_seconds: without sending.
        sending_seconds: with sending; what the rank waited is not in them.
        alone_cpu_seconds: of all threads, without sending.
        added_cpu_seconds: what sending added to those of the thread that computes, waiting aside.
        beside_cpu_seconds: what it took of other threads, also while the rank waited.
    """

    micro_batch_size: int
    alone_seconds: float
    sending_seconds: float
    alone_cpu_seconds: float = 0.0
    added_cpu_seconds: float = 0.0
    beside_cpu_seconds: float = 0.0


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
        self._everyone: list[RehearsedStep] = []
        self._steps: list[RehearsedStep] = []
        self._seen: MeasuredRank | None = None

    def learn(self, everyone: Sequence[Sequence[RehearsedStep]]) -> MeasuredRank:
        """The rank after one more rehearsal: the steps of each rank, all of one rank with the same micro-batch."""
        steps = everyone[self._measured.rank]
        self._steps += steps
        self._everyone += chain.from_iterable(everyone)
        found, size = learn_from_steps(self._measured, steps), steps[0].micro_batch_size
        # A rank that others wait for shows what sending takes; one that waits does that work meanwhile.
        if self._seen is None or _step_seconds(found, size) > _step_seconds(self._seen, size):
            self._seen = found
        if self._cores is None or _rate(self._steps) < _LIMITED * self._cores:
            return self._seen
        counted = learn_from_cpu_seconds(self._measured, self._steps, self._everyone)
        return max(self._seen, counted, key=lambda rank: rank.communication_load_seconds)


def _step_seconds(rank: MeasuredRank, size: int) -> float:
    return rank.time(size) + rank.communication_load_seconds


def learn_from_steps(measured: MeasuredRank, steps: Sequence[RehearsedStep]) -> MeasuredRank:
    """The rank as the seconds of rehearsed steps show it.

    If steps that send take longer than those that do not, by more than chance, sending takes the difference from every
    step. The curve is scaled to what the steps without sending took, or if they send at no cost, to both: the machine
    may be slower than before, and ranks that share it were in each other's way while all of them measured without a
    pause. All ranks rehearse at the same time: a machine that is faster at one time than at another, and theirs alike,
    does not make some of them look slower than others. So the curve is scaled even if chance explains the difference.

    Args:
        measured: the rank as it measured itself.
        steps: all with the same micro-batch.
    """
    expected = measured.time(steps[0].micro_batch_size)
    load = _significant([step.sending_seconds - step.alone_seconds for step in steps], expected)
    if load > 0:
        return _at_speed(replace(measured, communication_load_seconds=load), steps)
    seconds = [(step.alone_seconds, step.sending_seconds) for step in steps]
    return measured.slowed_down(median(min(pair) if load < 0 else sum(pair) / 2 for pair in seconds) / expected)


def learn_from_cpu_seconds(
    measured: MeasuredRank, steps: Sequence[RehearsedStep], everyone: Sequence[RehearsedStep]
) -> MeasuredRank:
    """The rank as the CPU seconds of rehearsed steps show it, where computing uses all that it gets.

    What sending takes of them, computing has to wait for, at the rate at which the rank gets them. That may be less
    than its limit: where nodes are emulated on one machine, it has less to give than all limits together.

    Args:
        measured: the rank as it measured itself.
        steps: of this rank, with any micro-batches.
        everyone: those of all ranks.
    """
    # Threads beside the computing one are read exactly. What they add to its own time by being in its way is a small
    # difference of long times: in proportion to theirs, for which the steps of all ranks count.
    shares = [step.added_cpu_seconds / step.beside_cpu_seconds for step in everyone if step.beside_cpu_seconds > 0]
    beside = max(0.0, median(step.beside_cpu_seconds for step in steps))
    taken = beside * (1 + max(0.0, median(shares or [0.0])))
    return _at_speed(replace(measured, communication_load_seconds=taken / _rate(steps)), steps)


def _rate(steps: Sequence[RehearsedStep]) -> float:
    """CPU seconds per second of computing."""
    return median(step.alone_cpu_seconds / step.alone_seconds for step in steps)


def _at_speed(measured: MeasuredRank, steps: Sequence[RehearsedStep]) -> MeasuredRank:
    """With the curve scaled to what steps without sending took."""
    return measured.slowed_down(median(step.alone_seconds / measured.time(step.micro_batch_size) for step in steps))


def _significant(seconds: Sequence[float], scale: float) -> float:
    """The median; 0 if chance explains it, or if it is little on that scale."""
    middle = median(seconds)
    deviation = median(abs(value - middle) for value in seconds)
    chance = max(_SIGNIFICANCE * deviation / math.sqrt(len(seconds)), _NEGLIGIBLE * scale)
    return middle if abs(middle) > chance else 0.0
