# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the C library keeps of freed memory in a process that trains on a CPU. Predictions count it."""

from __future__ import annotations


#: Bytes from which on a block is mapped and unmapped by itself, where units are gathered; the heap has smaller ones.
LARGEST_KEPT_BLOCK = 4 * 2**20
#: Bytes at the end of the heap that stay in the process when they are free, where units are gathered.
LARGEST_KEPT_END = 32 * 2**20
#: Bytes that may be free in the heap beside the most that a process has used at once (`runtime.heap_bound`).
MOST_FREE_IN_HEAP = 24 * 2**20
#: Bytes that predictions count beside it at most; see `free_in_heap`.
_BETWEEN_LOOKS = 16 * 2**20
#: The part of activations that predictions count for holes between them: where no units are gathered, nothing looks at
#: the heap in the middle of a forward.
HOLES_OF_ACTIVATIONS = 1 / 8


def free_in_heap(parameter_bytes: float) -> float:
    """Bytes that predictions count for free memory of a process that trains on a CPU.

    More than `MOST_FREE_IN_HEAP`, for what comes between two looks at the heap, and for what Python and the threads of
    a training take: at most as much as the model has.

    Args:
        parameter_bytes: of all parameters.
    """
    return MOST_FREE_IN_HEAP + min(_BETWEEN_LOOKS, parameter_bytes)
