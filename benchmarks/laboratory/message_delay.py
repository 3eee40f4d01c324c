# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How much longer messages between nodes take while these compute.

A message of a ring is sent on by a thread of the next rank. Where all of a node's cores compute, that thread waits for
one of them, or for the rest of a quota's period; where the link carries another message meanwhile that costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.groups import temporary_group


# In eight measurements on one cluster, delays were 1.1 to 2.8 ms with 3 repeats, and all but one 1.0 to 2.0 with 9.
_BUCKETS, _REPEATS = 4, 9
# As many as torch's gloo works on in a group at a time, by default.
_IN_FLIGHT = 2
# Taken to be the same for messages of any size; on a slow network there is not the time for large ones.
_LARGEST_BYTES = 4_000_000
# Some tenths of a millisecond of a core, in which other threads of the process can run. At its end a rank sees what
# has arrived.
_ROWS, _COLUMNS = (16, 384), (384, 1536)


def message_delay_seconds(size: int, groups: Sequence[Sequence[int]]) -> float:
    """What each message of an all-reduce takes longer beside computing than alone (collective over all ranks).

    Two all-reduces are on their way at a time, as in a backward; what they take longer together is shared by all.

    Args:
        size: bytes of each all-reduce; of larger ones it takes 4 MB.
        groups: ranks that exchange at the same time, each rank in one of them.
    """
    buffers = [torch.zeros(min(size, _LARGEST_BYTES) // 4) for _ in range(_BUCKETS)]
    differences = []
    with temporary_group(groups) as own:
        for _ in range(1 + _REPEATS):
            alone = _seconds(buffers, own, computes=False)
            differences.append(_seconds(buffers, own, computes=True) - alone)
        messages = 2 * (own.size() - 1) * _BUCKETS  # of a ring, one after the other
    return max(0.0, median(differences[1:])) / messages  # the first one sets up connections


def _seconds(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup, *, computes: bool) -> float:
    left, right = torch.ones(_ROWS), torch.ones(_COLUMNS)
    works: list[dist.Work] = []
    dist.barrier()
    begun = time.perf_counter()
    for place, buffer in enumerate(buffers):
        if place >= _IN_FLIGHT:
            _finish(works[place - _IN_FLIGHT], left, right, computes)
        works.append(dist.all_reduce(buffer, group=group, async_op=True))
    for work in works:
        _finish(work, left, right, computes)
    return time.perf_counter() - begun


def _finish(work: dist.Work, left: torch.Tensor, right: torch.Tensor, computes: bool) -> None:
    while computes and not work.is_completed():
        left @ right
    work.wait()
