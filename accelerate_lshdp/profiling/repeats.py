# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Repeated measurements of micro-batch sizes until their spread is small.

Sizes are measured in turn, round after round, so that a disturbance meets all of them alike. A short micro-batch is
run many times over for one measurement: CPU quotas hand out time in slices of 100 ms, and within a slice everything
runs unthrottled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median


#: A size is quiet when the relative spread of its measurements is below this.
QUIET_SPREAD = 0.02
LEAST_REPEATS = 3
#: Seconds that a measurement lasts at least: several slices of a CPU quota.
LEAST_SECONDS = 0.25


@dataclass
class Repeats:
    """The measurements of one size, in seconds a micro-batch."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds of a micro-batch."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Median absolute deviation divided by the median."""
        middle = self.median
        return median(abs(value - middle) for value in self.seconds) / middle

    @property
    def quiet(self) -> bool:
        """Whether there are enough measurements with a small spread."""
        return len(self.seconds) >= LEAST_REPEATS and self.spread < QUIET_SPREAD


def measure_repeatedly(
    run: Callable[[int, int], float],
    expected: Mapping[int, float],
    *,
    remaining: Callable[[], float],
    others_measure: Callable[[], bool] = lambda: False,
) -> dict[int, Repeats]:
    """Measures each size until all sizes are quiet or the time is spent; each size at least once.

    When all sizes are quiet, measuring goes on while other ranks still measure, as they must not find the machine less
    busy than training will make it.

    Args:
        run: ``run(size, count)`` trains ``count`` micro-batches of ``size`` samples; returns the seconds that took.
        expected: seconds of a micro-batch of each size, from a trial.
        remaining: returns the seconds left, negative when the time is spent.
        others_measure: called when this rank is quiet; returns whether another rank is not.

    Returns:
        The measurements of each size.
    """
    taken = {size: Repeats() for size in expected}
    while True:
        quiet = all(repeats.quiet for repeats in taken.values())
        if quiet and not others_measure():
            return taken
        measured_any = False
        for size, repeats in taken.items():
            # Time goes to noisy sizes first; once all are quiet, each is measured again in turn.
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
    """Mean seconds of a micro-batch over at least `LEAST_SECONDS`; ``known`` is an estimate of them."""
    total, count = 0.0, 0
    while total < LEAST_SECONDS:
        more = max(1, math.ceil((LEAST_SECONDS - total) / known))
        total += run(size, more)
        count += more
        known = total / count
    return total / count
