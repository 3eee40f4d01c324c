# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""When a rank waits for the others of its node in the middle of a backward, and when no more.

Gradients of a bucket leave a node when its slowest rank has added its own. Where one rank alone can use all processors
of the node, a rank that hurries ahead takes time from the slowest and gains nothing: it waits for it in the end.

Waiting is a courtesy. Nothing may depend on it: a rank may need something of this one first (gradients of another
model that it does not use itself, a collective of the script). So it ends soon, and for good if that happens again and
again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


#: How often a rank looks whether it is to keep in step: shares of processors change in mid-run.
_ASK_SECONDS = 5.0
#: How long it waits in one backward, beside the time that the last one took.
_LEAST_PATIENCE_SECONDS = 1.0
#: After so many backwards in a row in which its patience came to an end, it waits no more.
_MOST_TIMEOUTS = 3


class BackwardPacing:
    """How patient a rank is.

    Args:
        wanted: whether the rank is to keep in step at present.
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
        """A backward begins."""
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
        """Says how long it has waited, and whether that was to no purpose."""
        self._left = 0.0 if timed_out else max(0.0, self._left - seconds)
        self._timeouts += timed_out

    def finish(self) -> None:
        """The backward ends, all ranks of the node having done their part."""
        self._last_seconds = self._clock() - self._begun
        if self._left > 0:
            self._timeouts = 0
