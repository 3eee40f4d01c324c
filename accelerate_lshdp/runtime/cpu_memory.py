# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Says how much freed memory stays in the process while it trains on a CPU.

Every step frees its activations and gradients, tens to hundreds of megabytes. glibc gives what lies at the end of the
heap back to the kernel, which has to find and clear the same pages again in the next step: some ten thousand page
faults a step, 2 to 4 % of the processor's time for a ViT of 14 M parameters. So where nothing but activations and
gradients comes and goes, all of it is kept, within the bound of `runtime.heap_bound`.

Strategies that gather units free the gathered parameters, too. In the heap these would leave holes that the next ones,
a little larger, do not fit: gathered units of FSDP2 then take three times the memory that is in use at a time (11.9
instead of 3.8 bytes for each byte of parameters and node, 36 M parameters on two nodes of two ranks, strategy `fsdp`;
`tests/distributed/test_memory.py` measures it). So while a model is made and with these strategies, blocks above
`LARGEST_KEPT_BLOCK` are mapped and unmapped one by one, and of the heap's end `LARGEST_KEPT_END` are kept.
"""

from __future__ import annotations

import ctypes
import os
import platform

from accelerate_lshdp.documents.host_memory import LARGEST_KEPT_BLOCK, LARGEST_KEPT_END


# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


# Of thresholds: the largest that glibc takes, and what no heap's end exceeds.
_LARGEST_THRESHOLD, _NEVER = 32 * 2**20, 2**31 - 1


def keep_freed_memory(*, gathers: bool = True) -> bool:
    """Tells glibc to keep freed blocks, unless the user has tuned it or another allocator is loaded.

    Args:
        gathers: whether large blocks come and go, too, as where a strategy gathers units: small ones are kept then.

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
    block, end = (LARGEST_KEPT_BLOCK, LARGEST_KEPT_END) if gathers else (_LARGEST_THRESHOLD, _NEVER)
    return bool(mallopt(_M_MMAP_THRESHOLD, block) and mallopt(_M_TRIM_THRESHOLD, end))


def give_back_freed_memory() -> None:
    """Gives memory that is free now back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
