# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The seconds that a rank spends blocked in communication, measured and labelled ``lshdp::wait`` in a profile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.profiler_labels import label


_of_thread = threading.local()


def waited_seconds() -> float:
    """The seconds that this thread has spent blocked in communication since it began, summed over all clocks."""
    # Of the thread: an emulated slowdown stretches what its own thread has computed, and must not see what another
    # thread of the process (the one of a node reduction, say) has waited meanwhile.
    return getattr(_of_thread, "waited", 0.0)


class Moments(Protocol):
    """Moments of what a device computes, which runs behind the host."""

    def mark(self) -> Any:
        """The moment in which the device has done all that it was given until now."""

    def reach(self, moment: Any) -> None:
        """Waits for it."""

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one to another, which both have been reached."""


class WaitClock:
    """Adds up the seconds that this rank spends blocked in communication, and explains what fails there.

    Args:
        clock: seconds, monotonic.

    Attributes:
        moments: of a device; then what counts is how long it had nothing to do, which is less than the host waited.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self.moments: Moments | None = None
        self._clock = clock
        self._idle: list[tuple[Any, Any]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds that the block takes, also where it raises.

        Raises:
            CommunicationError: in place of torch's error, if the block's collective has failed.
        """
        started = self._clock()
        begin = None if self.moments is None else self.moments.mark()
        try:
            with label("wait"), failures_explained():
                yield
        finally:
            # Wall time: processor clocks do not count what a container's quota holds a process back.
            waited = self._clock() - started
            if begin is None:
                self.seconds += waited
            else:
                self._idle.append((begin, self.moments.mark()))
            _of_thread.waited = waited_seconds() + waited

    def take(self) -> float:
        """Returns the seconds counted since the last call, and counts from 0 again."""
        seconds, self.seconds = self.seconds, 0.0
        idle, self._idle = self._idle, []
        for begin, end in idle:
            self.moments.reach(end)
            seconds += self.moments.between(begin, end)
        return seconds

    def clear(self) -> None:
        """Counts from 0 again."""
        self.seconds = 0.0
        self._idle = []
