# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Bytes of gradients on the wire in each format, and in each of the engine's reductions."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


#: Size of the engine's own gradient buckets, in bytes.
BUCKET_BYTES = 25e6


def reduction_bytes(bucket_bytes: Sequence[float], communication_dtype: str) -> list[float]:
    """Bytes of gradients in each reduction of a step, in fp32.

    PowerSGD (Vogels et al., 2019) sends so little that the engine merges its buckets up to `BUCKET_BYTES`. Where FSDP2
    shards a node over several ranks the engine does not; that case is left out here.

    Args:
        bucket_bytes: bytes in fp32 of the buckets of all other formats, in the order in which they travel.
        communication_dtype: the format.
    """
    if not bucket_bytes or not WIRE_FORMATS[communication_dtype].merges_buckets:
        return list(bucket_bytes)
    merged = [0.0]
    for size in bucket_bytes:
        # A bucket that alone exceeds the limit is not split.
        if merged[-1] and merged[-1] + size > BUCKET_BYTES:
            merged.append(0.0)
        merged[-1] += size
    return merged
