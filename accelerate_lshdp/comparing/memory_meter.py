# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The most memory that each node's processes ever had, by looking often."""

from __future__ import annotations

import threading
from collections.abc import Callable

from accelerate_lshdp.comparing.rank_processes import RankError


class MemoryMeter:
    """Looks ten times a second while its block runs.

    Args:
        read: bytes of each node now.
        interval_seconds: between two looks.
    """

    def __init__(self, read: Callable[[], list[int]], interval_seconds: float = 0.1) -> None:
        self.peak_bytes: list[int] | None = None
        self._read = read
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryMeter:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Looks no more, whatever it could not read. Safe to call again."""
        self._ended.set()
        self._thread.join()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.stop()
        if self._failure is not None and kind is None:
            raise RankError(f"memory could not be read: {self._failure}") from self._failure

    def _look(self) -> None:
        try:
            while True:
                now = self._read()
                self.peak_bytes = [max(pair) for pair in zip(self.peak_bytes or now, now, strict=True)]
                if self._ended.wait(self._interval_seconds):
                    return
        except Exception as failure:  # a process has ended: who waits for it says so
            self._failure = failure


def proportional_set_size(pid: int) -> int:
    """The bytes of a process in memory; a page that n processes share counts 1/n in each."""
    import psutil

    return psutil.Process(pid).memory_full_info().pss
