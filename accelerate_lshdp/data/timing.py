# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How long the script waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar


_Item = TypeVar("_Item")


class FetchClock:
    """Adds up the seconds that fetching the batches of a pass takes from the script.

    The first batch of a pass does not count: it starts workers, and ranks wait for each other in it.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def timed(self, batches: Iterator[_Item]) -> Iterator[_Item]:
        """The same batches, with the time counted that it takes to get each."""
        began: float | None = None
        for batch in batches:
            if began is not None:
                self._seconds += time.perf_counter() - began
            yield batch
            del batch  # a batch that the script has dropped must not stay alive here
            began = time.perf_counter()

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
