# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What sending takes of a processor is found from CPU seconds, whatever else the machine does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from accelerate_lshdp.documents.network import shard_all_reduce
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.profiling.communication_cost import fit_communication_cost, reduction_cpu_seconds


class PretendedReduction(GradientReduction):
    """Takes 1 ms and 2 ns a byte of CPU time; the first one of each size 5 s more.

    The clock counts what `late` exchanges in a row took with the one after them.
    """

    def __init__(self, late: int = 0) -> None:
        self.now = self.uncounted = 0.0
        self.seen: list[int] = []
        self.late = late

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        assert shapes == [buffer.shape]
        self.now += 5.0 if index not in self.seen else 0.0
        self.uncounted += 1e-3 + 2e-9 * 4 * buffer.numel()
        if self.seen.count(index) % (self.late + 1) == 0:
            self.now, self.uncounted = self.now + self.uncounted, 0.0
        self.seen.append(index)
        return Done()


class Done(PendingReduction):
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


def test_cpu_seconds_leave_the_first_exchange_out() -> None:
    reduction = PretendedReduction()
    points = reduction_cpu_seconds(reduction, sizes=(4000, 4_000_000), clock=lambda: reduction.now)
    assert points == [(4000, pytest.approx(1e-3 + 8e-6)), (4_000_000, pytest.approx(9e-3))]


def test_what_the_clock_counts_late_is_not_lost() -> None:
    reduction = PretendedReduction(late=2)
    points = reduction_cpu_seconds(reduction, sizes=(4000, 4_000_000), clock=lambda: reduction.now, repeats=15)
    assert points == [(4000, pytest.approx(1e-3 + 8e-6)), (4_000_000, pytest.approx(9e-3))]


def test_handling_is_that_of_a_byte_that_a_rank_sends() -> None:
    exact = [(4000, 1e-3 + 8e-6), (4_000_000, 9e-3)]
    # In a ring of 4 each rank sends 1.5 bytes for each byte of the payload.
    communication_cost = fit_communication_cost(exact, [1] * 4)
    assert communication_cost.seconds_per_byte == pytest.approx(2e-9 / 1.5)
    assert communication_cost.seconds_per_collective == pytest.approx(1e-3)
    assert communication_cost.conversion_seconds_per_byte == 0
    # The same four ranks on two nodes: what a rank sends does not change.
    assert fit_communication_cost(exact, [2, 2]) == communication_cost
    # Two nodes that exchange shards: each rank sends its half of the payload.
    assert fit_communication_cost(exact, [2, 2], collective=shard_all_reduce).seconds_per_byte == pytest.approx(
        2e-9 / 0.5
    )


def test_what_bytes_do_not_explain_is_conversion() -> None:
    exact = [(0, 0.0), (1000, 2e-6)]
    lossy = [(0, 0.0), (1000, 1.5e-6)]
    assert fit_communication_cost(exact, [1, 1], lossy, 0.5).conversion_seconds_per_byte == pytest.approx(0.5e-9)
    # What it takes whatever the size is its own.
    fixed = fit_communication_cost(exact, [1, 1], [(0, 3e-6), (1000, 4e-6)], 0.5)
    assert fixed.seconds_per_collective == pytest.approx(3e-6)
    assert fixed.seconds_per_byte == fit_communication_cost(exact, [1, 1]).seconds_per_byte
    # Noise makes nothing negative.
    assert fit_communication_cost(exact, [1, 1], [(0, 0.0), (1000, 0.5e-6)], 0.5).conversion_seconds_per_byte == 0
    assert fit_communication_cost([(0, 3e-6), (1000, 2e-6)], [1, 1]).seconds_per_byte == 0
    with pytest.raises(ValueError, match="two different sizes"):
        fit_communication_cost(exact[:1], [1, 1])
