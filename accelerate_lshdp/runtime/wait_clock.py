"""The seconds that a rank spends blocked in communication, measured and labelled ``lshdp::wait`` in a profile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.profiler_labels import label


_of_thread = threading.local()


def waited_seconds() -> float:
    """The seconds that this thread has spent blocked in communication since it began, summed over all clocks."""
    # Of the thread: an emulated slowdown stretches what its own thread has computed, and must not see what another
    # thread of the process (the one of a node reduction, say) has waited meanwhile.
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
        """Counts the seconds that the block takes, also where it raises.

        Raises:
            CommunicationError: in place of torch's error, if the block's collective has failed.
        """
        started = self._clock()
        try:
            with label("wait"), failures_explained():
                yield
        finally:
            # Wall time: processor clocks do not count what a container's quota holds a process back.
            waited = self._clock() - started
            self.seconds += waited
            _of_thread.waited = waited_seconds() + waited

    def take(self) -> float:
        """Returns the seconds counted since the last call, and counts from 0 again."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
