# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Bytes of gradients on the wire: what each format makes of them, and how the engine bundles them into reductions."""

from __future__ import annotations

from collections.abc import Sequence


#: Bytes on the wire for each byte of a gradient in fp32. int8: one scale of 4 bytes for each block of 1024 values.
WIRE_SHARES = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 1024)}
#: Size of the engine's own gradient buckets, in bytes.
BUCKET_BYTES = 25e6


def reduction_bytes(bucket_bytes: Sequence[float], communication_dtype: str) -> list[float]:
    """Bytes of gradients in each reduction of a step, in fp32.

    PowerSGD sends so little that the engine gives it few large buckets, of up to `BUCKET_BYTES`; not so where FSDP2
    shards nodes of several ranks, which this leaves out.

    Args:
        bucket_bytes: of the buckets in other formats, in the order in which they travel; of gradients in fp32.
        communication_dtype: the format.
    """
    if communication_dtype != "powersgd":
        return list(bucket_bytes)
    merged = [0.0]
    for size in bucket_bytes:
        if merged[-1] and merged[-1] + size > BUCKET_BYTES:
            merged.append(0.0)
        merged[-1] += size
    return merged
