# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What fails on one rank is raised on all, and a rank that has failed still takes part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import layout

from accelerate_lshdp.runtime.agreement import raise_on_all_ranks
from accelerate_lshdp.runtime.object_exchange import (
    Attempt,
    NodeLayout,
    all_objects,
    as_bytes,
    broadcast_tensor,
    errors_on_all_ranks,
    object_from,
)
from accelerate_lshdp.runtime.participants import alone, among, has_others, place_of


def fail_on(ranks, group_size=None):
    rank = dist.get_rank()
    group = dist.new_group(list(range(group_size))) if group_size else None
    if group_size and rank >= group_size:
        return "not asked"
    error = ValueError(f"no {'even' if rank % 2 else 'odd'} number") if rank in ranks else None
    try:
        raise_on_all_ranks(error, group)
    except RuntimeError as agreed:
        return str(agreed), agreed.__cause__ is error
    return None


def test_one_error_for_all_ranks(workers):
    assert workers(3).run(fail_on, []) == [None] * 3
    text = "ranks 0, 2: ValueError: no odd number"
    assert workers(3).run(fail_on, [0, 2]) == [(text, True)] * 3
    text = "rank 1: ValueError: no even number\nrank 2: ValueError: no odd number"
    assert workers(3).run(fail_on, [1, 2]) == [(text, True)] * 3


def test_one_error_for_a_group(workers):
    text = "rank 1: ValueError: no even number"
    assert workers(3).run(fail_on, [1], 2) == [(text, True), (text, True), "not asked"]


def test_alone():
    raise_on_all_ranks(None)
    with pytest.raises(RuntimeError, match="^rank 0: a reason$"):
        raise_on_all_ranks("a reason")
    with pytest.raises(RuntimeError, match="^rank 0: counting failed: ZeroDivisionError: ") as caught:
        with errors_on_all_ranks("counting"):
            1 / 0  # noqa: B018
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_only_the_first_failure_counts():
    attempt, done = Attempt(), []
    assert attempt(lambda: 5) == 5
    assert attempt(lambda: [][0]) is None
    attempt.always(lambda: done.append("always"))
    attempt.always(lambda: {}[0])
    assert attempt(lambda: done.append("later")) is None
    assert isinstance(attempt.error, IndexError) and done == ["always"]


def every_dtype():
    here = layout()
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.bfloat16):
        for shape in ((), (0, 3), (2, 3)):
            expected = torch.arange(6)[: int(torch.Size(shape).numel())].reshape(shape).to(dtype)
            found = broadcast_tensor(expected if here.rank == 1 else None, shape, dtype, 1, here)
            assert found.dtype == dtype and torch.equal(as_bytes(found), as_bytes(expected))
    return True


def test_tensors_of_every_dtype_travel(workers):
    assert workers(2).run(every_dtype) == [True, True]


def exchange_in_pairs():
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]  # all of them on all ranks: torch numbers groups
    pair = groups[rank // 2]
    first = rank // 2 * 2
    with among(pair):
        here = NodeLayout(rank % 2, 2, 0, 1, rank % 2, torch.device("cpu"))
        assert all_objects(rank) == [first, first + 1]
        assert [object_from(place, rank) for place in range(2)] == [first, first + 1]
        assert [place_of(each) for each in (first, first + 1)] == [0, 1]
        mine = torch.full((3,), float(rank))
        found = broadcast_tensor(mine if here.rank else None, (3,), torch.float32, 1, here)
        assert found.tolist() == [first + 1.0] * 3
        with pytest.raises(RuntimeError, match=f"^rank {first + 1}: a reason$"):
            raise_on_all_ranks("a reason" if here.rank else None)
        with alone():
            assert not has_others() and all_objects(rank) == [rank] and place_of(rank) == 0
    return all_objects(rank)


def test_ranks_of_a_group_exchange_without_the_others(workers):
    assert workers(4).run(exchange_in_pairs) == [[0, 1, 2, 3]] * 4
