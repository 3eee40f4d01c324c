# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A launcher passes signals on to its ranks, which may save and end upon them, and waits for them."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

from accelerate_lshdp.runtime.launched_ranks import ranks_of_this_launcher
from accelerate_lshdp.runtime.signal_thread import SignalThread


#: Seconds that ranks have between SIGTERM and SIGKILL, as torch's launcher gives them.
RANK_SECONDS = 30.0
_SIGNAL_BASE = 128  # a shell's exit code for a process that signal n ended is 128 + n


def pass_signals_on() -> None:
    """SIGTERM and SIGUSR1 of this process, a launcher, go to its ranks from now on.

    torch's launcher would end by itself upon SIGTERM, and the launchers of other nodes would wait minutes for it when
    their ranks have ended well. Ranks that know nothing of SIGTERM end by it; those that are still there after
    `RANK_SECONDS` are killed. Without ranks it ends this process. Nothing on systems that have no such signals.
    """
    if not hasattr(signal, "SIGUSR1"):
        return
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _leave_to_thread)
    SignalThread(_pass_on)


def kill_ranks() -> None:
    """Ends the ranks of this launcher at once, which then ends with their failure."""
    _send_to_ranks(signal.SIGKILL)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Nothing: a handler has to be there for the thread to hear of a signal."""


def _pass_on(number: int) -> None:
    if number not in (signal.SIGTERM, signal.SIGUSR1):
        return
    if not _send_to_ranks(number) and number == signal.SIGTERM:
        # Other nodes are waited for, in one call of C++.
        os._exit(_SIGNAL_BASE + number)
    if number == signal.SIGTERM:
        timer = threading.Timer(RANK_SECONDS, _send_to_ranks, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()


def _send_to_ranks(number: int) -> int:
    """Sends a signal to all ranks; returns how many there are."""
    import psutil

    ranks = ranks_of_this_launcher()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    return len(ranks)
