# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients in bfloat16: half the bytes of fp32. The shortest example of a format that sends one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction, PendingWork, wire_format


@wire_format("bf16")
class Bf16Reduction(GradientReduction):
    """All-reduce in bfloat16: half the bytes of fp32, sums rounded to 8 bits of mantissa."""

    scatter_dtype = torch.bfloat16

    @classmethod
    def wire_bytes(cls, communication: Communication, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> int:
        return buffer.numel() * torch.bfloat16.itemsize

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        compressed = buffer.to(torch.bfloat16)
        # The closure below keeps `compressed` alive until it is copied back; the buffer stays as it is until then.
        work = dist.all_reduce(compressed, group=self.group, async_op=True)
        return PendingWork(work, after=lambda: buffer.copy_(compressed))
