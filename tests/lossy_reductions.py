# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the tests of lossy reductions share: gradients that every rank can make, and runs of many steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_lshdp.documents.plan import Communication
from accelerate_lshdp.engine.wire.formats import make_reduction, make_second_group
from accelerate_lshdp.engine.wire.reduction import GradientReduction


#: Two buffers: matrices of equal and of other sizes, vectors, and one that is no multiple of anything.
SHAPES = (
    ((24, 16), (24,), (24, 16), (16, 40), (3, 1), (1, 1, 7)),
    ((13, 1, 9), (4, 3, 5, 5), (), (2, 2)),
)


def gradient(rank: int, step: int, index: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """A rank's gradient buffer: ranks differ in size and direction, steps are alike, as gradients are."""
    size = sum(torch.Size(shape).numel() for shape in shapes)
    lasting = torch.Generator().manual_seed(1000 * index + rank)
    passing = torch.Generator().manual_seed(1_000_000 + 1000 * (100 * step + index) + rank)
    values = torch.randn(size, generator=lasting) + 0.3 * torch.randn(size, generator=passing)
    return (values * (rank + 1) * 1e-3).to(dtype)


def new_reduction(communication: Communication) -> GradientReduction:
    second_group = make_second_group(communication, [range(dist.get_world_size())])
    return make_reduction(communication, dist.group.WORLD, second_group)


def run_steps(
    reduction: GradientReduction,
    steps: Sequence[int],
    buffers: Sequence[Sequence[Sequence[int]]] = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> list[list[Tensor]]:
    """The sums of each step, one a buffer; all buffers of a step are under way at the same time."""
    rank = dist.get_rank()
    results = []
    for step in steps:
        sums = [gradient(rank, step, index, shapes, dtype) for index, shapes in enumerate(buffers)]
        pending = [
            reduction.start(buffer, index, [torch.Size(shape) for shape in shapes])
            for index, (buffer, shapes) in enumerate(zip(sums, buffers, strict=True))
        ]
        for one in reversed(pending):
            one.wait()
        assert all(one.is_done() for one in pending)
        results.append(sums)
    return results


def exact_sum(
    world_size: int, step: int, index: int, dtype: torch.dtype = torch.float32, buffers: Sequence = SHAPES
) -> Tensor:
    return torch.stack([gradient(r, step, index, buffers[index], dtype) for r in range(world_size)]).double().sum(0)


def run_resumed(communication: Communication, steps: int, stop: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """An uninterrupted run from ``stop`` on, and one that goes on from there with another reduction's state."""
    reduction = new_reduction(communication)
    run_steps(reduction, range(stop))
    state = {key: tensor.clone() for key, tensor in reduction.state_dict().items()}
    whole = run_steps(reduction, range(stop, steps))
    resumed = new_reduction(communication)
    resumed.load_state_dict(state)
    assert resumed.state_dict().keys() == state.keys()
    return whole, run_steps(resumed, range(stop, steps))


def run_non_finite(communication: Communication, value: float, place: int) -> tuple[bool, Tensor, bool]:
    """Whether a step with a value that is not finite on the last rank is not finite here; the next step's sum; and
    whether that is finite."""
    reduction = new_reduction(communication)
    run_steps(reduction, range(2))
    rank, shapes = dist.get_rank(), SHAPES[0]
    buffer = gradient(rank, 2, 0, shapes, torch.float32)
    if rank == dist.get_world_size() - 1:
        buffer[place] = value
    reduction.start(buffer, 0, [torch.Size(shape) for shape in shapes]).wait()
    after = run_steps(reduction, [3])[0][0]
    return not bool(buffer.isfinite().all()), after, bool(after.isfinite().all())


def run_odd_buffers(communication: Communication) -> list[tuple[list, list]]:
    """Small, empty and zero buffers and other precisions: what came out, and the exact sums, as lists."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reduction = new_reduction(communication)
    cases = [
        (torch.tensor([2.0 + rank]), torch.tensor([2.0 * ranks + sum(range(ranks))])),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(3000), torch.zeros(3000)),
        (torch.ones(5, dtype=torch.float64), ranks * torch.ones(5)),
        (torch.ones(1025, dtype=torch.bfloat16), ranks * torch.ones(1025)),
        (torch.full((7,), 1e-44), None),
    ]
    results = []
    for index, (buffer, expected) in enumerate(cases):
        dtype = buffer.dtype
        reduction.start(buffer, index, [buffer.shape]).wait()
        assert buffer.dtype == dtype and buffer.isfinite().all()
        if expected is not None:
            results.append((buffer.double().tolist(), expected.double().tolist()))
    return results
