# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which parameters ranks have gradients for: told in a byte a model, and one by one where that has changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accelerate_lshdp.runtime import row_group
from accelerate_lshdp.runtime.row_group import RowGroup
from accelerate_lshdp.runtime.step_exchange import RankReport, StepExchange
from accelerate_lshdp.runtime.wait_clock import WaitClock


ALL, NONE, SOME, OTHERS = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]


def told(
    usages: list[list[list[list[float]]]], direct_ranks: int
) -> tuple[list[list[list[float]]], list[list[int]], list[float]]:
    """Of each step the counts of each model, and the bytes of the rows that this rank has sent; and reported values.

    Args:
        usages: of each step, rank and model.
        direct_ranks: from how many ranks on reports are passed on.
    """
    sent, gather = [], RowGroup.gather

    def counted(self: RowGroup, row: torch.Tensor) -> object:
        sent[-1].append(row.nbytes)
        return gather(self, row)

    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(row_group, "DIRECT_RANKS", direct_ranks)
        monkeypatch.setattr(RowGroup, "gather", counted)
        exchange = StepExchange(rank, size, WaitClock())
        for step in usages:
            sent.append([])
            own = [torch.tensor(usage, dtype=torch.float64) for usage in step[rank]]
            reports, counts = exchange.after_backward(RankReport(1.0 + rank, 0.0, 0.0, 0.0), own).wait()
            found.append([count.tolist() for count in counts])
        sent.append([])
        total = exchange.sum(torch.tensor([0.1, 1.0], dtype=torch.float64))
    assert total.tolist() == pytest.approx([0.1 * size, size])
    return found, sent[:-1], [report.compute_seconds for report in reports]


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
    for counts, sent, seconds in workers(3).run(told, [usages] * 3, direct_ranks):
        assert counts == [expected] * 3 and seconds == [1.0, 2.0, 3.0]
        # 13 numbers, a byte for each model, and a bit for each parameter of one that is used in part, once.
        report = 8 * 13 + len(expected)
        assert sent == [[report, 1][:rows], [report], [report]]


def test_ranks_tell_again_what_has_changed(workers) -> None:
    """Of three ranks: two use some parameters, then one others, one all; then as before; then a model has grown."""
    usages = [
        [[SOME], [OTHERS], [ALL]],
        [[SOME], [SOME], [ALL]],
        [[ALL], [SOME], [NONE]],
        [[SOME], [SOME], [ALL]],
        [[[1.0, 0.0]], [[1.0, 1.0]], [[1.0, 0.0]]],
    ]
    expected = [[2.0, 2.0, 2.0], [3.0, 1.0, 3.0], [2.0, 1.0, 2.0], [3.0, 1.0, 3.0], [3.0, 1.0]]
    for counts, sent, _ in workers(3).run(told, usages, 8):
        assert [count for [count] in counts] == expected
        assert [len(rows) for rows in sent] == [2, 2, 1, 1, 2]
