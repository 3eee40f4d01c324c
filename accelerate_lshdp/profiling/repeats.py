# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measures again until the figures are quiet.

Sizes are measured in turn, round after round, so that a disturbance meets all of them alike. A short micro-batch is
run many times over for one measurement: CPU quotas hand out time in slices of 100 ms, and within a slice everything
runs unthrottled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median


#: A size is quiet when the spread of its measurements is below this.
QUIET_SPREAD = 0.02
LEAST_REPEATS = 3
#: A measurement lasts at least as long; several of a quota's slices.
LEAST_SECONDS = 0.25


@dataclass
class Repeats:
    """The measurements of one size, in seconds a micro-batch."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Median absolute deviation over median."""
        middle = self.median
        return median(abs(value - middle) for value in self.seconds) / middle

    @property
    def quiet(self) -> bool:
        return len(self.seconds) >= LEAST_REPEATS and self.spread < QUIET_SPREAD


def measure_repeatedly(
    run: Callable[[int, int], float],
    expected: Mapping[int, float],
    *,
    remaining: Callable[[], float],
    others_measure: Callable[[], bool] = lambda: False,
) -> dict[int, Repeats]:
    """Measures each size until all are quiet or the time is spent.

    When all sizes are quiet, measuring goes on while other ranks still measure: they must not find the machine emptier
    than training will. When the time is spent, each size has been measured at least once.

    Args:
        run: ``run(size, count)`` trains ``count`` micro-batches of ``size`` samples; returns the seconds that took.
        expected: seconds of a micro-batch of each size, from a trial.
        remaining: seconds left, negative when the time is spent.
        others_measure: told that this rank is quiet by being called, says whether another rank is not.
    """
    taken = {size: Repeats() for size in expected}
    while True:
        quiet = all(repeats.quiet for repeats in taken.values())
        if quiet and not others_measure():
            return taken
        measured_any = False
        for size, repeats in taken.items():
            if repeats.quiet and not quiet:
                continue
            known = repeats.median if repeats.seconds else expected[size]
            if repeats.seconds and max(known, LEAST_SECONDS) > remaining():
                continue
            repeats.seconds.append(_measure(run, size, known))
            measured_any = True
        if not measured_any:
            return taken


def _measure(run: Callable[[int, int], float], size: int, known: float) -> float:
    """Seconds of a micro-batch, from so many that they last long enough; ``known`` says how many that may be."""
    total, count = 0.0, 0
    while total < LEAST_SECONDS:
        more = max(1, math.ceil((LEAST_SECONDS - total) / known))
        total += run(size, more)
        count += more
        known = total / count
    return total / count
