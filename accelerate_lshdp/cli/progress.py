# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Progress of a command on stderr: bars on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


#: A function of (name of a phase, amount done, total); a total of 0 stands for a phase that has nothing to do.
Advance = Callable[[str, float, float], None]
_QUARTER = 25  # percent between two lines


@contextmanager
def progress(shown: bool) -> Iterator[Advance]:
    """A function that shows the progress of phases on stderr; it does nothing where ``shown`` is false."""
    if not shown:
        yield lambda phase, done, total: None
    # Bars move the cursor, which dumb terminals and log files do not understand.
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bars() as advance:
            yield advance
    else:
        lines = _Lines(sys.stderr)
        yield lines.advance
        lines.end_phase()


@contextmanager
def _bars() -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:
        tasks: dict[str, Any] = {}

        def advance(phase: str, done: float, total: float) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
            bars.update(tasks[phase], completed=min(done, total) if total else 1, total=total or 1)

        yield advance


class _Lines:
    """Prints a line when a phase begins, at each quarter of it, and when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase: str | None = None
        self._began = 0.0
        self._printed_percent = 0

    def advance(self, phase: str, done: float, total: float) -> None:
        if phase != self._phase:
            self.end_phase()
            self._phase, self._began, self._printed_percent = phase, time.monotonic(), 0
            self._print(f"{phase} ...")
        percent = int(100 * done / total) if total else 100
        if self._printed_percent + _QUARTER <= percent < 100:
            self._printed_percent = percent // _QUARTER * _QUARTER
            self._print(f"{phase}: {self._printed_percent} %")

    def end_phase(self) -> None:
        if self._phase is not None:
            self._print(f"{self._phase}: done in {time.monotonic() - self._began:.0f} s")
        self._phase = None

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
