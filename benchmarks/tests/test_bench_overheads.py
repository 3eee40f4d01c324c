# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What FSDP2 takes beside computing and sending is counted for what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laboratory import overheads

from accelerate_lshdp.engine.wire.reduction import TimedAllGather, TimedReduceScatter
from accelerate_lshdp.runtime.wait_clock import WaitClock


def of_bytes_inside(nodes: list[list[int]]) -> tuple[float, list[tuple[str, int, int]]]:
    """Where a gather takes 2 s and a reduction 5 s; also what was exchanged: its name, bytes and ranks."""
    exchanged: list[tuple[str, int, int]] = []
    real_seconds = overheads._exchange_seconds

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def exchange(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, *options: Any) -> None:
            exchanged.append((name, max(output.nbytes, given.nbytes), group.size()))
            real(output, given, group, *options)

        return exchange

    def pretended(work: Callable[[], object]) -> float:
        assert real_seconds(work) > 0
        return {"gather": 2.0, "scatter": 5.0}[exchanged[-1][0]]

    clock = WaitClock()
    gather, scatter = noting("gather", TimedAllGather(clock)), noting("scatter", TimedReduceScatter(clock))
    overheads._exchange_seconds = pretended
    try:
        return overheads.inside_seconds_per_byte(4000, nodes, gather, scatter), sorted(set(exchanged))
    finally:
        overheads._exchange_seconds = real_seconds


def test_a_byte_inside_a_node_costs_its_part_of_two_gathers_and_a_reduction(workers: Any) -> None:
    # Two ranks take (2 + 2 + 5) / 3 seconds each and send 4000 bytes together.
    for found, exchanged in workers(4).run(of_bytes_inside, [[0, 1], [2, 3]], timeout=60):
        assert found == 2 * 3.0 / 4000
        assert exchanged == [("gather", 4000, 2), ("scatter", 4000, 2)]


def test_ranks_without_others_on_their_node_send_nothing_inside(workers: Any) -> None:
    assert workers(4).run(of_bytes_inside, [[0], [1], [2], [3]], timeout=60) == [(0.0, [])] * 4


def test_the_cost_of_an_exchange_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones do not count; of the others all do, however much some of them show."""
    costs = iter([9.0] * 5 + [0.0, 0.0, 0.0, 8.0] * 10)
    spent = [0.0]
    monkeypatch.setattr(overheads.time, "process_time", lambda: spent[0])

    def exchange() -> None:
        spent[0] += next(costs)

    assert overheads._exchange_seconds(exchange) == 2.0
    assert next(costs, None) is None


def test_seconds_of_steps_are_those_of_forward_and_backward_but_for_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(overheads.time, "process_time", lambda: now[0])
    spent = overheads.ComputingSeconds()
    computing = iter([9.0, 1.0, 2.0, 1.0, 4.0])

    def step() -> None:
        for what, seconds in (("data", 50.0), ("forward", next(computing)), ("backward", 1.0), ("optimizer", 70.0)):
            with spent.span(what):
                now[0] += seconds

    assert overheads.step_seconds(step, spent) == 3.0
    assert next(computing, None) is None
