# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Paces the backward of a rank: how long it waits in the middle of it for slower ranks of its node.

Gradients of a bucket leave a node when its slowest rank has added its own. Where one rank alone can use all processors
of the node, a rank that hurries ahead takes processor time from the slowest one, and gains nothing, as it waits for
that rank in the end.

Correctness does not depend on this wait, and must not: the slower rank may itself need something of this one first
(gradients of another model, a collective of the script). So each wait is bounded, and after several that timed out in
a row a rank does not wait any more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


#: How often a rank asks whether it should wait at all: shares of processors change in mid-run.
_ASK_SECONDS = 5.0
#: How long it waits in one backward at most, beside the seconds that the last one took.
_LEAST_PATIENCE_SECONDS = 1.0
#: After so many backwards in a row whose wait timed out, a rank waits no more for the rest of the run.
_MOST_TIMEOUTS = 3


class BackwardPacing:
    """The seconds that a rank may still wait in a backward for slower ranks of its node.

    Args:
        wanted: tells whether the rank should wait for the others at present.
        clock: seconds, monotonic.
    """

    def __init__(self, wanted: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted = wanted
        self._clock = clock
        self._is_wanted, self._asked = False, -math.inf
        self._begun = 0.0
        self._last_seconds = 0.0
        self._timeouts = 0
        self._left = 0.0

    def begin(self) -> None:
        """Begins a backward with the patience that the last ones have earned."""
        self._begun = self._clock()
        if self._timeouts == _MOST_TIMEOUTS:
            return
        if self._begun >= self._asked + _ASK_SECONDS:
            self._is_wanted, self._asked = self._wanted(), self._begun
        self._left = _LEAST_PATIENCE_SECONDS + self._last_seconds if self._is_wanted else 0.0

    @property
    def patience(self) -> float:
        """Seconds that the rank may still wait in this backward."""
        return self._left

    def waited(self, seconds: float, timed_out: bool) -> None:
        """Takes a wait off the patience of this backward.

        Args:
            seconds: that the rank has waited.
            timed_out: whether the wait ended without the slower rank having caught up.
        """
        self._left = 0.0 if timed_out else max(0.0, self._left - seconds)
        self._timeouts += timed_out

    def finish(self) -> None:
        """Ends a backward in which all ranks of the node have done their part."""
        self._last_seconds = self._clock() - self._begun
        if self._left > 0:
            self._timeouts = 0
