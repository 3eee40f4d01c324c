# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Sizes of the buckets in which gradients travel: the engine fills them, predictions count their memory. No torch."""

from __future__ import annotations


#: Above this a bucket uses the network as well as it can.
LARGEST_BYTES = 25_000_000
#: Below this the latency of its messages counts.
SMALLEST_BYTES = 1_000_000
#: The last bucket travels when the backward is over, and nothing hides it: so it should be a small part of the model.
#: But a ring of n ranks sends a bucket in messages of 1/n, twice n - 1 of them one after the other, and each wakes a
#: thread that may have to wait for a processor. So a message, not a bucket, has this part of the model.
_MESSAGES = 48
#: Buckets of a rank that may wait until the ranks before it on its node have added theirs. A rank that is faster than
#: these would else come to hold all of its gradients beside those of the node; it has to wait for them in any case.
WAITING_BUCKETS = 3


def default_bucket_bytes(gradient_bytes: int, reducing_ranks: int) -> int:
    """The size of buckets in bytes for a model: small enough to begin early and to leave little for the end.

    Args:
        gradient_bytes: of all gradients.
        reducing_ranks: number of ranks that sum a bucket between nodes.
    """
    return min(LARGEST_BYTES, max(SMALLEST_BYTES, gradient_bytes * max(2, reducing_ranks) // _MESSAGES))
