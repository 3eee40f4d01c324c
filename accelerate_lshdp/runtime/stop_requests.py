# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`StopRequests`: signals that ask this process to save its training and end, noted until ranks tell each other.

Schedulers send SIGTERM when they take a machine away, and SIGUSR1 some time before the time is over; often to one rank
only, or to one after the other. A rank that saved and ended by itself would leave the others waiting for it. So the
signal is one number in what ranks exchange in every step, and all of them act on it after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from accelerate_lshdp.runtime.launched_ranks import living_ranks_beside
from accelerate_lshdp.runtime.signal_thread import SignalThread


#: What schedulers send; SIGUSR1 exists on Unix only.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
#: Signals within so many seconds are one request: schedulers send them to launchers as well, which pass them on.
SAME_SECONDS = 10.0


class StopRequests:
    """The signals of this process that ask for an end. What was received and agreed on stays until `forget`.

    Attributes:
        received: number of the first signal that has come while they were watched; 0: none.
        agreed: number of a signal that some rank had received when ranks told each other last, the same on all of
            them; 0: none.
    """

    def __init__(self) -> None:
        self.received = 0
        self.agreed = 0
        self._received_at = 0.0
        self._before: dict[int, Any] = {}
        self._cleanup_watch: SignalThread | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_in_child)

    def watch(self, signals: Sequence[int] = STOP_SIGNALS) -> bool:
        """From now on signals are noted, instead of ending this process. Signals reach the main thread only.

        One that comes `SAME_SECONDS` after the first ends this process as it would have without: who sends it does not
        want to wait.

        Returns:
            Whether it has begun with this call: not in another thread than the main one, nor where it had already.
        """
        if threading.current_thread() is not threading.main_thread() or self._before:
            return False
        for number in signals:
            self._before[number] = signal.signal(number, self._note)
        self._cleanup_watch = _cleanup_watch()
        return True

    def leave(self) -> None:
        """Signals mean again what they did before `watch`."""
        if self._cleanup_watch is not None:
            self._cleanup_watch.end()
            self._cleanup_watch = None
        while self._before:
            number, handler = self._before.popitem()
            # A handler that was not installed by Python cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _leave_in_child(self) -> None:
        """In a process that was forked from this one, such as a worker of a loader."""
        if self._before:
            # A pool of processes ends its members by SIGTERM, and would wait for ever for one that notes it.
            self.leave()
            # Some schedulers send this one to all processes of a job. It would end a worker, and with it the rank.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def forget(self) -> None:
        """Begins anew."""
        self.received = self.agreed = 0

    def agree(self, received: Sequence[int]) -> None:
        """Takes in what all ranks have received.

        Args:
            received: a number of each rank, the same list on all of them.
        """
        self.agreed = max(self.agreed, *received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._received_at = number, now
        elif now - self._received_at > SAME_SECONDS:
            self.leave()
            os.kill(os.getpid(), number)


#: Of this process: who is told to end is told so for whatever it trains, now and next.
of_process = StopRequests()


def _cleanup_watch() -> SignalThread | None:
    """A thread that ends this rank when its launcher ends all of them because one has failed; None: it is alone.

    torch's launcher does that by SIGTERM, and by SIGKILL half a minute later. A rank that only notes the first, or
    waits in a collective for the one that has failed, would hold the launcher up for so long.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not ranks.isdecimal() or int(ranks) < 2:
        return None
    if living_ranks_beside(os.getppid()) is None:  # its parent is a program between it and the launcher
        return None

    def look(number: int) -> None:
        if number == signal.SIGTERM and (living_ranks_beside(os.getppid()) or 0) < int(ranks):
            os.kill(os.getpid(), signal.SIGKILL)

    return SignalThread(look)
