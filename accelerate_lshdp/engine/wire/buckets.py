# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which gradients travel in one message: buckets of parameters, and the rank of a node that each belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from accelerate_lshdp.documents.bucket_sizes import default_bucket_bytes


#: The first bucket is closed when it has this part of a full one: until then the network has nothing to do.
_FIRST_PART = 0.25


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
    total = sum(parameter.numel() * parameter.dtype.itemsize for parameter in parameters)
    limit = default_bucket_bytes(total, reducing_ranks) if bucket_bytes is None else bucket_bytes
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
