# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Exchanges over the host give what collectives of torch give, and take no memory of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accelerate_lshdp.engine.wire.host_exchange import exchange_in_pairs, gather_in_ring
from accelerate_lshdp.engine.wire.reduction import TimedAllGather
from accelerate_lshdp.runtime.wait_clock import WaitClock


def gathered(dtype: torch.dtype) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    whole = torch.full((size, 5), -1.0, dtype=dtype)
    whole[rank] = rank + torch.arange(5) / 8
    gather_in_ring(whole.unbind(), group)
    expected = (torch.arange(size)[:, None] + torch.arange(5) / 8).to(dtype)
    # An input that is no part of the output, as callers other than FSDP2 give it.
    again = torch.zeros(size * 5, dtype=dtype)
    TimedAllGather(WaitClock())(again, expected[rank].clone(), group)
    dist.destroy_process_group(group)
    return bool((whole == expected).all()) and bool((again.view(size, 5) == expected).all())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_gathers_in_the_order_of_ranks(workers, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert workers(ranks).run(gathered, dtype) == [True] * ranks


def exchanged() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    received = torch.empty(size)
    exchange_in_pairs(received, 10.0 * rank + torch.arange(size), group)
    dist.destroy_process_group(group)
    return received.tolist()


def test_pairs_exchange_one_part_of_each(workers) -> None:
    assert workers(3).run(exchanged) == [[10.0 * source + rank for source in range(3)] for rank in range(3)]
