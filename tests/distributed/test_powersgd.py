# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The PowerSGD reduction: against a plain one, what error feedback gives, and unusual buffers."""

from __future__ import annotations

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
from accelerate_lshdp.engine.wire import powersgd as powersgd_reduction
from accelerate_lshdp.engine.wire.powersgd import powersgd_bytes


RANK = 2
POWERSGD = Communication("powersgd", RANK, 1)
#: What is compressed at rank 2 of the first buffer: (offset, rows, columns).
MATRICES = ((0, 24, 16), (408, 24, 16), (792, 16, 40))


def plain(world_size: int, steps: int, starts: dict[int, Tensor]) -> list[Tensor]:
    """Vogels et al., algorithm 1, for sums, matrix by matrix in fp64; the first step is exact."""
    errors = {(rank, offset): torch.zeros(a, b).double() for rank in range(world_size) for offset, a, b in MATRICES}
    qs = {offset: start.double() for offset, start in starts.items()}
    sums = []
    for step in range(steps):
        result = exact_sum(world_size, step, 0, torch.float64)
        for offset, a, b in MATRICES if step else ():
            whole = [gradient(rank, step, 0, SHAPES[0], torch.float64) for rank in range(world_size)]
            mine = [g[offset : offset + a * b].view(a, b) + errors[r, offset] for r, g in enumerate(whole)]
            p = torch.linalg.qr(sum(m @ qs[offset] for m in mine)).Q
            qs[offset] = sum(m.T @ p for m in mine)
            for rank, m in enumerate(mine):
                errors[rank, offset] = m - p @ (p.T @ m)
            result[offset : offset + a * b] = (p @ qs[offset].T).view(-1)
        sums.append(result)
    return sums


def several_steps(communication: Communication, dtype: torch.dtype, steps: int) -> tuple[list[Tensor], Tensor]:
    """Sums of the first buffer, and the Q that it started with."""
    reduction = new_reduction(communication)
    first = run_steps(reduction, [0], SHAPES[:1], dtype)
    start = reduction.state_dict()["0.q"].clone()
    return [sums[0] for sums in [*first, *run_steps(reduction, range(1, steps), SHAPES[:1], dtype)]], start


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_the_plain_algorithm_on_all_ranks(workers, world_size):
    results = workers(world_size).run(several_steps, POWERSGD, torch.float64, 5)
    start = results[0][1]
    # Kept in the order of the numbers of rows, as (rank, columns) each.
    of_16, *of_24 = start.split([RANK * 40, RANK * 16, RANK * 16])
    starts = {792: of_16.view(RANK, 40).T, 0: of_24[0].view(RANK, 16).T, 408: of_24[1].view(RANK, 16).T}
    expected = plain(world_size, 5, starts)
    for sums, q in results:
        assert torch.equal(q, start)
        for step, (got, reference) in enumerate(zip(sums, expected, strict=True)):
            assert torch.equal(got, results[0][0][step])
            assert (got - reference).norm() <= 1e-11 * reference.norm()


def on_unlike_processors(steps: int) -> list[list[Tensor]]:
    rank = torch.distributed.get_rank()
    decompose = torch.linalg.qr

    def differing(matrix: Tensor) -> torch.return_types.linalg_qr:
        """As on processors whose results differ in the last bits."""
        return torch.return_types.linalg_qr((decompose(matrix).Q * (1 + 1e-6 * rank), matrix))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(powersgd_reduction, "_processors", lambda: (rank,))
        monkeypatch.setattr(torch.linalg, "qr", differing)
        reduction = new_reduction(POWERSGD)
        assert reduction.has_unlike_processors
        return run_steps(reduction, range(steps))


def test_unlike_processors_get_the_same_bits(workers):
    results = workers(3).run(on_unlike_processors, 4)
    for rank in (1, 2):
        for mine, first in zip(results[rank], results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))


def test_what_is_left_out_comes_later(workers):
    steps = 60
    for results in workers(2).run(run_all_buffers, steps):
        for index in range(len(SHAPES)):
            exact = torch.stack([exact_sum(2, step, index) for step in range(steps)])
            got = torch.stack([sums[index].double() for sums in results])
            assert (got[0] - exact[0]).norm() <= 1e-6 * exact[0].norm()  # warm-up
            one_step = (got[1] - exact[1]).norm() / exact[1].norm()
            assert one_step > 0.3
            assert (got.sum(0) - exact.sum(0)).norm() <= 0.1 * exact.sum(0).norm()


def run_all_buffers(steps: int) -> list[list[Tensor]]:
    return run_steps(new_reduction(POWERSGD), range(steps))


@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_bit_for_bit(workers, stop):
    for whole, resumed in workers(2).run(run_resumed, Communication("powersgd", RANK, 2), 5, stop):
        assert all(torch.equal(a, b) for x, y in zip(whole, resumed, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("place", [5, 390])  # in a matrix, and in a vector
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_everywhere_and_forgotten_in_the_next_step(workers, value, place):
    for not_finite, _, finite in workers(2).run(run_non_finite, POWERSGD, value, place):
        assert not_finite and finite


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_odd_buffers(workers, world_size):
    for results in workers(world_size).run(run_odd_buffers, Communication("powersgd", 4, 0)):
        for got, expected in results:
            assert got == pytest.approx(expected, rel=0.01)


def zero_gradients() -> tuple[list[float], float]:
    """Largest numbers of steps with zeros; then what two steps with a matrix of rank 1 lack of their sum."""
    reduction = new_reduction(Communication("powersgd", 4, 0))
    shape, largest = torch.Size((20, 30)), []
    for _ in range(3):
        buffer = torch.zeros(600)
        reduction.start(buffer, 0, [shape]).wait()
        largest.append(buffer.abs().max().item())
    thin = torch.outer(torch.arange(20.0), torch.arange(30.0))
    total = -4 * thin
    for _ in range(2):  # the first one starts from a Q of zeros, so it finds only a part
        buffer = thin.clone().view(-1)
        reduction.start(buffer, 0, [shape]).wait()
        total += buffer.view(shape)
    return largest, total.abs().max().item() / thin.max().item()


def test_zeros_and_matrices_of_lower_rank(workers):
    for zeros, missing in workers(2).run(zero_gradients):
        assert zeros == [0.0, 0.0, 0.0] and missing <= 1e-5


def test_bytes() -> None:
    shapes = [torch.Size(shape) for shape in ((384, 1536), (384,), (3, 3))]
    size = sum(shape.numel() for shape in shapes)
    assert powersgd_bytes(size, shapes, 4) == 4 * (4 * (384 + 1536) + 384 + 9)
