# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`StepGate`: the ranks of a node make an optimizer's step all or none of them, also if they are ended meanwhile.

Where each rank of a node steps a part of the parameters, what the node has is of use only if all parts are of the same
step. So ranks meet in front of each step, and whoever ends them closes the gate: those that have not been let through
by then, all together, make no more steps.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


_WORD_BYTES = 8
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 1e-3


class StepGate:
    """One rank's side of the gate.

    Args:
        path: of a file in memory that the ranks of the node share; whoever comes first makes it.
        rank: place of this rank on its node.
        ranks: of the node.
        timeout_seconds: how long to wait for another rank.
    """

    def __init__(self, path: Path, rank: int, ranks: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, _WORD_BYTES * (1 + ranks))  # zeros; nothing changes if another rank was here
        # First whether it is closed, then the step in front of which each rank has come.
        self._words = memoryview(mmap.mmap(self._file, _WORD_BYTES * (1 + ranks))).cast("q")
        self._threads = threading.Lock()

    @property
    def arrived(self) -> int:
        """The step to which this rank has come last, from 1."""
        return self._words[1 + self._rank]

    def let_through(self) -> bool:
        """Waits until all ranks of the node have come to their next step; False: the gate was closed before.

        Raises:
            RuntimeError: another rank did not come in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        with self._locked():
            if self._words[0]:
                return False
            step = self._words[1 + self._rank] = self.arrived + 1
        nap = _SHORTEST_NAP
        while self._last_of_all() < step:
            if self._words[0]:
                with self._locked():  # nobody comes any more: what is read now stays so
                    return self._last_of_all() >= step
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"waited {self._timeout_seconds:g} s for the other ranks of this node to come to the optimizer's"
                    " step, expected the same steps on all of them; their own output says more"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return True

    def close(self) -> int:
        """Lets nobody through any more; the last step that all were let through to, 0 if there was none."""
        with self._locked():
            self._words[0] = 1
            return self._last_of_all()

    def _last_of_all(self) -> int:
        return min(self._words[1:])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The file's lock is that of the process, so its threads need another one.
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
