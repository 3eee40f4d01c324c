# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a rank did when in a step: events with begin and end on a clock that all processes of a machine share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Timeline:
    """The events of one step.

    Args:
        clock: seconds; `time.monotonic` counts from the same moment in all processes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._events: list[dict[str, Any]] = []
        self._clock = clock

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._events = []

    @property
    def events(self) -> list[dict[str, Any]]:
        """``name``, ``begin`` and ``end`` of each event of the step, in the order in which they began."""
        return sorted(self._events, key=lambda event: event["begin"])

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens in the block is one event. Events may lie in each other: a wait in a backward."""
        begin = self._clock()
        try:
            yield
        finally:
            self._events.append({"name": name, "begin": begin, "end": self._clock()})

    def note_waits(self, clock: Any) -> None:
        """From now on, whatever this `WaitClock` counts as waiting is an event too."""
        waiting = clock.waiting

        @contextmanager
        def noted() -> Iterator[None]:
            with self.span("wait"), waiting():
                yield

        clock.waiting = noted
