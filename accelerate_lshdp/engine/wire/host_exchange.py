# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""All-gather and all-to-all over the host, as messages between pairs of ranks into the memory where they belong.

gloo's own all-gather receives into memory of its own and copies: twice the memory, and time, as the kernel has to find
and clear the pages of such memory every time (0.4 s for a gigabyte were seen, as much as six copies of it take).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def gather_in_ring(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """All-gather in a ring: every rank receives from the rank before it and sends to the one after it (blocks).

    Between nodes a ring sends least, however many ranks they have: only one of a node's has a follower elsewhere.

    Args:
        parts: one of each rank, in their order, contiguous; this rank's own is filled, the others are written.
        group: the ranks.
    """
    size, rank = group.size(), group.rank()
    source, target = (rank - 1) % size, (rank + 1) % size
    # In each round a rank passes on what it received in the round before, its own part first.
    for step in range(size - 1):
        _exchange(parts[(rank - step - 1) % size], source, parts[(rank - step) % size], target, group)


def exchange_in_pairs(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """An all-to-all over the host in which every rank gets from one rank at a time (blocks).

    gloo's own lets all ranks send to each other at once. Several streams into one port of a switch overrun its queue
    there, and what TCP then sends again leaves half of a slow link unused.

    Args:
        received: 1-D, one equal part from each rank, in their order.
        sent: likewise, one part to each rank.
    """
    size, rank = group.size(), group.rank()
    parts_in, parts_out = received.view(size, -1), sent.view(size, -1)
    parts_in[rank].copy_(parts_out[rank])
    # In round d every rank receives from rank - d and sends to rank + d: each port has one stream in and one out.
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        _exchange(parts_in[source], source, parts_out[target], target, group)


def _exchange(received: torch.Tensor, source: int, sent: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
    works = (
        # The receive is posted first, and neither is waited for before both are: two ranks that each wait for their
        # send would wait for ever.
        dist.irecv(received, group=group, group_src=source),
        dist.isend(sent, group=group, group_dst=target),
    )
    for work in works:
        work.wait()
