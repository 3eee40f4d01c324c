"""The seconds that a rank spends blocked in communication."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate_lshdp.runtime.failures import failures_explained


_of_thread = threading.local()


def waited_seconds() -> float:
    """What this thread has spent blocked in communication so far, by all clocks."""
    return getattr(_of_thread, "waited", 0.0)


class WaitClock:
    """Adds up the seconds that this rank spends blocked in communication, and explains what fails there.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = self._clock()
        try:
            with failures_explained():
                yield
        finally:
            waited = self._clock() - started
            self.seconds += waited
            _of_thread.waited = waited_seconds() + waited

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
