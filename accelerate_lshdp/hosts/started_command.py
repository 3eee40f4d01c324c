# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`StartedCommand`: a command that an agent has started on its machine, what it prints, and its end."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from accelerate_lshdp.runtime.parent_death import LAUNCHER_VARIABLE


#: Seconds that a command has between SIGTERM and SIGKILL, to end what it has started; and to save before, too: the
#: launcher of torch gives its ranks 30 for that.
STOP_SECONDS, SAVE_SECONDS = 10.0, 35.0
# Of progress bars, which write a line again and again, one state a second is told.
_REDRAWN_SECONDS = 1.0


class StartedCommand:
    """A running command. It ends with the process that made it, if it is one of this package's own.

    Args:
        argv: the command.
        environment: added to this process's.
        tell: takes events: ``{"event": "output", "stream": 1 or 2, "text": a line}`` and, once and last,
            ``{"event": "ended", "code": its exit code}``. It is called in other threads, one at a time for a stream.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._tell = tell
        self._process = subprocess.Popen(
            list(argv),
            # The command sees to it that it ends with this process, also where this one is killed.
            env={**os.environ, **environment, LAUNCHER_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        streams = {1: self._process.stdout, 2: self._process.stderr}
        self._readers = [
            threading.Thread(target=self._read, args=(number, stream), daemon=True)
            for number, stream in streams.items()
        ]
        for reader in self._readers:
            reader.start()
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def signal(self, number: int) -> None:
        """Sends it a signal; nothing if it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends it, and returns when it has ended. Safe to call again.

        Args:
            seconds: that it has between SIGTERM and SIGKILL.
        """
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # What it has started and left: processes of its session that the signal above did not reach.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._waiter.join(STOP_SECONDS)

    def _wait(self) -> None:
        code = self._process.wait()
        for reader in self._readers:
            # Processes that a script has left in the background may hold the pipes for as long as they like.
            reader.join(_REDRAWN_SECONDS)
        self._tell({"event": "ended", "code": code if code >= 0 else 128 - code})

    def _read(self, number: int, stream: IO[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest, told = "", 0.0
        with stream:
            while block := stream.read1(1 << 16):
                *lines, rest = (rest + decoder.decode(block)).split("\n")
                for line in lines:
                    self._tell({"event": "output", "stream": number, "text": _last_state(line)})
                if "\r" in rest and time.monotonic() - told > _REDRAWN_SECONDS:
                    told = time.monotonic()
                    shown, _, rest = rest.rpartition("\r")
                    self._tell({"event": "output", "stream": number, "text": _last_state(shown)})
        if rest:
            self._tell({"event": "output", "stream": number, "text": _last_state(rest)})


def _last_state(line: str) -> str:
    """What of a line is seen: the part after the last return of the carriage."""
    return line.rstrip("\r").rpartition("\r")[2]
