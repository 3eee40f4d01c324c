# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a format for gradients sends, and what it takes of a processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group, wire_bytes
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.profiling.communication_cost import SIZES, reduction_cpu_seconds


#: Columns of the matrices that messages consist of, as in a transformer: PowerSGD compresses nothing but matrices.
_COLUMNS = 1024


def without_exact_steps(name: str) -> dict[str, int]:
    """The options of a format with which a few steps show what many would take."""
    return {option: 0 for option in WIRE_FORMATS[name].options if option.endswith("warmup_steps")}


def measure_format(name: str, shapes: Sequence[torch.Size]) -> dict[str, Any]:
    """Measures one format over all ranks (collective).

    Args:
        name: ``communication.dtype``.
        shapes: of the model's parameters.

    Returns:
        points: (bytes of gradients, CPU seconds) of two messages; wire_share: of the larger one, bytes for one byte of
        fp32; wire_bytes: of the whole model.
    """
    communication = Communication(name, **without_exact_steps(name))
    second_group = make_second_group(communication, [range(dist.get_world_size())])
    reduction = make_reduction(communication, dist.group.WORLD, second_group)
    large = torch.empty(max(SIZES) // 4, device="meta")
    model = torch.empty(sum(shape.numel() for shape in shapes), device="meta")
    points = reduction_cpu_seconds(_OfMatrices(reduction))
    if second_group is not None:
        dist.barrier()
        dist.destroy_process_group(second_group)
    return {
        "points": points,
        "wire_share": wire_bytes(communication, large, [_as_matrix(large)]) / max(SIZES),
        "wire_bytes": wire_bytes(communication, model, shapes),
    }


class _OfMatrices(GradientReduction):
    """A reduction whose buffers are matrices."""

    def __init__(self, reduction: GradientReduction) -> None:
        super().__init__(reduction.group)
        self.reduction = reduction

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        return self.reduction.start(buffer, index, [_as_matrix(buffer)])


def _as_matrix(buffer: torch.Tensor) -> torch.Size:
    return torch.Size((buffer.numel() // _COLUMNS, _COLUMNS))
