# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The int8 reduction: against a plain one, what error feedback gives, and unusual buffers."""

from __future__ import annotations

import math

import pytest
import torch
from lossy_reductions import (
    SHAPES,
    exact_sum,
    gradient,
    new_reduction,
    run_non_finite,
    run_odd_buffers,
    run_resumed,
    run_steps,
)
from torch import Tensor

from accelerate_lshdp.documents.plan import Communication
from accelerate_lshdp.engine.wire.int8 import int8_bytes


INT8 = Communication("int8")
LONG = (((2500, 3),),)  # several blocks on every owner


def quantised(values: Tensor, block: int) -> Tensor:
    """Plain block-wise quantisation: what the receiver gets for ``values``, shape (blocks * block,)."""
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(1, keepdim=True) * torch.tensor(1 / 127, dtype=torch.float32)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return ((blocks * inverse).round().to(torch.int8).float() * scales).view(-1)


def plain(world_size: int, steps: int, shapes: tuple, dtype: torch.dtype) -> list[Tensor]:
    """The algorithm in one process, without messages."""
    size = gradient(0, 0, 0, shapes, dtype).numel()
    chunk = math.ceil(size / world_size)
    blocks = math.ceil(chunk / 1024)
    block = 4 * math.ceil(chunk / blocks / 4)
    padded = world_size * blocks * block
    errors, owner_error = torch.zeros(world_size, padded), torch.zeros(padded)
    sums = []
    for step in range(steps):
        total = owner_error
        for rank in range(world_size):
            errors[rank, :size] += gradient(rank, step, 0, shapes, dtype)
            sent = quantised(errors[rank], block)
            errors[rank] -= sent
            total = total + sent
        result = quantised(total, block)
        owner_error = total - result
        sums.append(result[:size].to(dtype))
    return sums


def several_steps(buffers: tuple, dtype: torch.dtype, steps: int) -> list[Tensor]:
    return [sums[0] for sums in run_steps(new_reduction(INT8), range(steps), buffers, dtype)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("buffers", "dtype"), [(SHAPES[:1], torch.float64), (LONG, torch.float32)])
def test_equals_the_plain_algorithm_on_all_ranks(workers, world_size, buffers, dtype):
    expected = plain(world_size, 3, buffers[0], dtype)
    results = workers(world_size).run(several_steps, buffers, dtype, 3)
    for rank_sums in results:
        for step, (sums, reference) in enumerate(zip(rank_sums, expected, strict=True)):
            assert torch.equal(sums, results[0][step])
            # Products and sums may be fused, which moves a number that is exactly between two integers.
            one = reference.abs().max() / 127
            assert (sums - reference).abs().max() <= 1.01 * one
            assert ((sums - reference).abs() > 1e-3 * one).double().mean() < 0.001


def test_what_is_rounded_off_comes_later(workers):
    steps = 40
    for results in workers(3).run(run_all_buffers, steps):
        for index in range(len(SHAPES)):
            exact = torch.stack([exact_sum(3, step, index) for step in range(steps)])
            got = torch.stack([sums[index].double() for sums in results])
            one_step = (got[0] - exact[0]).norm()
            assert 0 < one_step <= 0.02 * exact[0].norm()
            # What has not arrived after many steps is what one step leaves over, not forty times that.
            assert (got.sum(0) - exact.sum(0)).norm() <= 2 * one_step


def run_all_buffers(steps: int) -> list[list[Tensor]]:
    return run_steps(new_reduction(INT8), range(steps))


def test_resumed_bit_for_bit(workers):
    for whole, resumed in workers(2).run(run_resumed, INT8, 5, 2):
        assert all(torch.equal(a, b) for x, y in zip(whole, resumed, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_everywhere_and_forgotten_in_the_next_step(workers, value):
    for not_finite, after, finite in workers(2).run(run_non_finite, INT8, value, 5):
        assert not_finite and finite
        assert (after - exact_sum(2, 3, 0)).norm() <= 0.05 * after.norm()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_odd_buffers(workers, world_size):
    for results in workers(world_size).run(run_odd_buffers, INT8):
        for got, expected in results:
            assert got == pytest.approx(expected, rel=0.01)


def test_bytes() -> None:
    assert int8_bytes(1024) == 1028 and int8_bytes(14_000_000) == pytest.approx(14e6 * (1 + 4 / 1024), rel=1e-5)
