# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which gradients travel in one message: buckets of parameters, and the rank of a node that each belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


#: Above this a bucket uses the network as well as it can.
LARGEST_BYTES = 25_000_000
#: Below this the latency of its messages counts.
SMALLEST_BYTES = 1_000_000
#: The last bucket travels when the backward is over, and nothing hides it: so it should be a small part of the model.
#: But a ring of n ranks sends a bucket in messages of 1/n, twice n - 1 of them one after the other, and each wakes a
#: thread that may have to wait for a processor. So a message, not a bucket, has this part of the model.
_MESSAGES = 48
#: The first bucket is closed when it has this part of a full one: until then the network has nothing to do.
_FIRST_PART = 0.25


def default_bucket_bytes(parameters: Sequence[nn.Parameter], reducing_ranks: int) -> int:
    """The size of buckets in bytes for a model: small enough to begin early and to leave little for the end.

    Args:
        parameters: the trainable ones.
        reducing_ranks: number of ranks that sum a bucket between nodes.
    """
    total = sum(parameter.numel() * parameter.dtype.itemsize for parameter in parameters)
    return min(LARGEST_BYTES, max(SMALLEST_BYTES, total * max(2, reducing_ranks) // _MESSAGES))


def fill_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int | None, reducing_ranks: int) -> list[list[int]]:
    """Indices of parameters, bucket by bucket, in the order in which a backward usually produces gradients.

    Args:
        parameters: the trainable ones, in the order of the model.
        bucket_bytes: of one bucket; a larger parameter has one for itself. None: ``default_bucket_bytes``, and a
            smaller first one where there are several.
        reducing_ranks: ranks that sum a bucket between nodes.

    Returns:
        Buckets of one dtype and device each.
    """
    limit = default_bucket_bytes(parameters, reducing_ranks) if bucket_bytes is None else bucket_bytes
    total = sum(parameter.numel() * parameter.dtype.itemsize for parameter in parameters)
    # A model that fits one bucket is sent at once: a second message would cost more than an early first one gains.
    first = _FIRST_PART * limit if bucket_bytes is None and total > limit else limit
    buckets: list[list[int]] = []
    sizes: list[int] = []
    # One open bucket a kind, so that a few parameters of another dtype do not close that of the others. The layout
    # depends on the model and the options alone: it is the same on all ranks, and in a run that goes on from a
    # checkpoint, which adds the same numbers in the same order then.
    open_bucket: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, parameter in reversed(list(enumerate(parameters))):
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.dtype.itemsize
        place = open_bucket.get(kind)
        if place is None or sizes[place] + size > limit or (place == 0 and sizes[place] >= first):
            place = open_bucket[kind] = len(buckets)
            buckets.append([])
            sizes.append(0)
        buckets[place].append(index)
        sizes[place] += size
    return buckets


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Local ranks that the buckets of a node belong to: each bucket goes to the rank that has the least so far.

    Args:
        sizes: of the buckets, in bytes or elements.
        ranks: number of ranks of the node.
    """
    loads = [0] * ranks
    chosen = []
    for size in sizes:
        # Ties go to the lower rank: all ranks have to come to the same result without asking each other.
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[rank] += size
        chosen.append(rank)
    return chosen
