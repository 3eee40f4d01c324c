# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a format for gradients sends, and what it takes of a processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_lshdp.comparing.formats import model_wire_bytes, without_exact_steps
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group, wire_bytes
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.profiling.communication_cost import SIZES, reduction_cpu_seconds


#: Columns of the matrices that messages consist of, as in a transformer: PowerSGD compresses nothing but matrices.
_COLUMNS = 1024


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
    points = reduction_cpu_seconds(_OfMatrices(reduction))
    if second_group is not None:
        dist.barrier()
        dist.destroy_process_group(second_group)
    return {
        "points": points,
        "wire_share": wire_bytes(communication, large, [_as_matrix(large)]) / max(SIZES),
        "wire_bytes": model_wire_bytes(name, shapes),
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
