# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Keeps small freed blocks in the process while it trains on a CPU, and gives large ones back.

Every step frees its activations and gradients, tens to hundreds of megabytes. glibc gives what lies at the end of the
heap back to the kernel, which has to find and clear the same pages again in the next step: some ten thousand page
faults a step, 2 to 4 % of the processor's time for a ViT of 14 M parameters.

Blocks above `LARGEST_KEPT_BLOCK` are mapped and unmapped one by one. In the heap they would leave holes that the next
ones, a little larger, do not fit: gathered units of FSDP2 then take three times the memory that is in use at a time
(11.9 instead of 3.8 bytes for each byte of parameters and node, 36 M parameters on two nodes of two ranks, strategy
`fsdp`; `tests/distributed/test_memory.py` measures it). Clearing their pages is little beside what is computed with
them.
"""

from __future__ import annotations

import ctypes
import os
import platform

from accelerate_lshdp.documents.host_memory import LARGEST_KEPT_BLOCK, LARGEST_KEPT_END


# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tells glibc to keep small freed blocks, unless the user has tuned it or another allocator is loaded.

    Returns:
        Whether glibc has taken both settings.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _VARIABLES):
        return False
    if "malloc" in os.environ.get("LD_PRELOAD", ""):  # jemalloc, tcmalloc: they have their own ways
        return False
    # glibc moves the mmap threshold by itself, up to 32 MB, but no more once either threshold was set: so both are.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK) and mallopt(_M_TRIM_THRESHOLD, LARGEST_KEPT_END)
    return bool(kept)
