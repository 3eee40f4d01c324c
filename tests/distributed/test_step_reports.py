# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which parameters ranks have gradients for: told in a byte a model, and one by one where it is some of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accelerate_lshdp.runtime import row_group
from accelerate_lshdp.runtime.row_group import RowGroup
from accelerate_lshdp.runtime.step_exchange import RankReport, StepExchange, Used
from accelerate_lshdp.runtime.wait_clock import WaitClock


ALL, NONE, SOME = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]


def told(usages: list[list[list[float]]], direct_ranks: int) -> tuple[list[list[float]], list[int], list[float]]:
    """The counts of each model, the bytes of the rows that this rank has sent, and a value of all reports."""
    sent, gather = [], RowGroup.gather

    def counted(self: RowGroup, row: torch.Tensor) -> object:
        sent.append(row.nbytes)
        return gather(self, row)

    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(row_group, "DIRECT_RANKS", direct_ranks)
        monkeypatch.setattr(RowGroup, "gather", counted)
        exchange = StepExchange(rank, size, WaitClock())
        own = [torch.tensor(usage, dtype=torch.float64) for usage in usages[rank]]
        reports, counts = exchange.after_backward(RankReport(1.0 + rank, 0.0, 0.0, 0.0), own).wait()
        total = exchange.sum(torch.tensor([0.1, 1.0], dtype=torch.float64))
    assert total.tolist() == pytest.approx([0.1 * size, size])
    return [count.tolist() for count in counts], sent[:-1], [report.compute_seconds for report in reports]


@pytest.mark.parametrize("direct_ranks", [8, 1])
@pytest.mark.parametrize(
    ("usages", "expected", "rows"),
    [
        ([[ALL, NONE], [ALL, ALL], [NONE, ALL]], [[2.0] * 3, [2.0] * 3], 1),
        ([[ALL, SOME], [ALL, NONE], [NONE, ALL]], [[2.0] * 3, [2.0, 1.0, 2.0]], 2),
        ([[SOME, []], [SOME, []], [ALL, []]], [[3.0, 1.0, 3.0], []], 2),
        ([[], [], []], [], 1),
    ],
    ids=["all or none", "some of one", "no parameters", "no models"],
)
def test_ranks_count_who_used_a_parameter(workers, usages, expected, rows: int, direct_ranks: int) -> None:
    for counts, sent, seconds in workers(3).run(told, usages, direct_ranks):
        assert counts == expected and seconds == [1.0, 2.0, 3.0]
        # 13 numbers, a byte for each model, and a bit for each parameter of one that is used in part.
        assert sent == [8 * 13 + len(expected), 1][:rows]


@pytest.mark.parametrize(
    ("usage", "expected"), [(ALL, Used.ALL), (NONE, Used.NONE), (SOME, Used.SOME), ([], Used.NONE)]
)
def test_a_model_is_used_by_all_none_or_some(usage: list[float], expected: Used) -> None:
    assert Used.of(torch.tensor(usage)) is expected
