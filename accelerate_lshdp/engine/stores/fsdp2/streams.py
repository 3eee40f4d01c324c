# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Lifetime of memory that one stream of a device has allocated and another one uses."""

from __future__ import annotations

import torch


def used_on_this_stream(tensor: torch.Tensor) -> None:
    """Keeps a tensor's memory from being used again before what the current stream does with it is done.

    In FSDP2's all-reduce hook the current stream is the one given to ``set_all_reduce_hook``. It waits for the
    reduce-scatter stream, on which FSDP2 allocated the buffer of reduced gradients; nothing makes the reduce-scatter
    stream wait for it. After the hook FSDP2 casts the buffer or copies it to the host on the hook's stream, without
    blocking, and drops its last reference. The allocator knows of the reduce-scatter stream only: it would give the
    memory to the reduce-scatter of the next unit, which then writes into what still travels or is being copied.
    So the allocator is told of this stream: the memory becomes free when all that has been queued on it by the time
    of the last reference's end is done, the copy after the hook included.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
