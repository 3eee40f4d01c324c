# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the C library keeps of freed memory in a process that trains on a CPU. Predictions count it."""

from __future__ import annotations


#: Bytes from which on a block is mapped and unmapped by itself, where units are gathered; the heap has smaller ones.
LARGEST_KEPT_BLOCK = 4 * 2**20
#: Bytes at the end of the heap that stay in the process when they are free, where units are gathered.
LARGEST_KEPT_END = 32 * 2**20
#: Bytes that stand for what is free between blocks in use where no units are gathered, and all freed memory stays.
#: Also a placement counts them, before it is known whether it gathers units.
FREE_IN_HEAP = 64 * 2**20
