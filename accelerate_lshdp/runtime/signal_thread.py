# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SignalThread`: calls a function for each signal of this process at once, also while its main thread is blocked.

Python runs a handler in the main thread, between two of its instructions: not while that waits in C++, for a rank that
has failed or for a node that has not started. What Python's own C handler writes into a descriptor comes at once.
"""

from __future__ import annotations

import signal
import socket
import threading
import traceback
from collections.abc import Callable


class SignalThread:
    """A thread that hears of all signals that have a Python handler. Made in the main thread.

    Args:
        call: takes a signal's number, in that thread.
    """

    def __init__(self, call: Callable[[int], None]) -> None:
        self._call = call
        self._hears, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def end(self) -> None:
        """Ends it; also its remains in a process that was forked from this one."""
        signal.set_wakeup_fd(self._before)
        self._bell.close()

    def _listen(self) -> None:
        with self._hears:
            while received := self._hears.recv(1):
                try:
                    self._call(received[0])
                except Exception:  # a thread that ended here would leave this process deaf to signals
                    traceback.print_exc()
