# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`HeapBound`: bounds the freed memory that stays in a process when it needs most, where it trains on a CPU.

Blocks that glibc does not map one by one lie in its heap: most activations of small models, and the small parameters
of gathered units. They are freed in another order than they were allocated, and the holes between them stay in the
process. How large these become depends on everything that a model does, and differs from process to process: no plan
can foresee it. Mapping all blocks one by one leaves no holes, but steps of small models take much longer, as the
kernel clears every page before each use.

So the holes may be as large as they like until the process has `MOST_FREE_IN_HEAP` more than it has ever used at once.
Then all free pages go back to the kernel, those in holes, too (``malloc_trim``).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform

from accelerate_lshdp.documents.host_memory import MOST_FREE_IN_HEAP


class _Counts(ctypes.Structure):
    """What ``mallinfo2`` of glibc returns: bytes, but for numbers of blocks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


class HeapBound:
    """The memory of this process, looked at while models train. See the module.

    Args:
        most_free: bytes that may be free in the heap beside the most that was in use.

    Attributes:
        returns: how often free memory was given back.
    """

    def __init__(self, most_free: int = MOST_FREE_IN_HEAP) -> None:
        libc = ctypes.CDLL(None)
        self._counts, self._trim = libc.mallinfo2, libc.malloc_trim
        self._counts.restype = _Counts
        self._most_free, self._most_used, self.returns = most_free, 0, 0
        self._file = self._open()
        os.register_at_fork(after_in_child=self._open_again)
        self._give_back()

    @staticmethod
    def is_possible() -> bool:
        """Whether the C library is glibc, from 2.33 on, and the kernel tells of pages in memory."""
        is_glibc = platform.libc_ver()[0] == "glibc"
        return is_glibc and hasattr(ctypes.CDLL(None), "mallinfo2") and os.path.exists("/proc/self/statm")

    def check(self) -> None:
        """Gives free memory back if the process has too much of it. Called often: it reads one small file."""
        if (resident := self.resident_bytes()) <= self._limit:
            self._has_returned = False
            return
        self._set_limit(self.used_bytes())
        if resident <= self._limit:
            self._has_returned = False
        elif self._has_returned:
            # Nothing was free at the last look, so all this was in use at once since then.
            self._set_limit(resident - self._beside)
        else:
            self._give_back()

    def used_bytes(self) -> int:
        """Bytes in use, in the heap and in blocks that are mapped one by one."""
        counts = self._counts()
        return counts.uordblks + counts.hblkhd

    def resident_bytes(self) -> int:
        """Bytes of this process in memory, without files and what it shares with others."""
        _, resident, shared, *_ = os.pread(self._file, 256, 0).split()
        return (int(resident) - int(shared)) * mmap.PAGESIZE

    @staticmethod
    def _open() -> int:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def _open_again(self) -> None:
        # A forked process would go on reading its parent's.
        os.close(self._file)
        self._file = self._open()

    def _set_limit(self, used: int) -> None:
        """Sets the bytes in memory from which on more is looked at."""
        self._most_used = max(self._most_used, used)
        self._limit = self._beside + self._most_used + self._most_free

    def _give_back(self) -> None:
        self._trim(0)
        self.returns += 1
        # What is left is in use or not the C library's: Python's objects, stacks. This may have grown since last time.
        used = self.used_bytes()
        self._beside = max(0, self.resident_bytes() - used)
        self._set_limit(used)
        self._has_returned = True


@functools.cache
def heap_bound() -> HeapBound | None:
    """That of this process; None where there can be none."""
    return HeapBound() if HeapBound.is_possible() else None
