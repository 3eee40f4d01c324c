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
) -> tuple[list[list[list[bool]]], list[list[int]], list[RankReport]]:
    """Of each step which parameters of each model are used, and the bytes that this rank tells; and the last reports.

    Args:
        usages: of each step, rank and model.
        direct_ranks: from how many ranks on reports are passed on.
    """
    sent, gather, unite = [], RowGroup.gather, RowGroup.unite

    def gathered(self: RowGroup, row: torch.Tensor) -> object:
        sent[-1].append(row.nbytes)
        return gather(self, row)

    def united(self: RowGroup, bits: torch.Tensor) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(RowGroup, "gather", gather)
            sent[-1].append(bits.nbytes)
            return unite(self, bits)

    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(row_group, "DIRECT_RANKS", direct_ranks)
        monkeypatch.setattr(RowGroup, "gather", gathered)
        monkeypatch.setattr(RowGroup, "unite", united)
        exchange = StepExchange(rank, size, WaitClock())
        for step in usages:
            sent.append([])
            own = [torch.tensor(usage, dtype=torch.float64) for usage in step[rank]]
            reports, used = exchange.after_backward(full_report(rank), own).wait()
            found.append([each.tolist() for each in used])
        sent.append([])
        total = exchange.sum(torch.tensor([0.1, 1.0], dtype=torch.float64))
    assert total.tolist() == pytest.approx([0.1 * size, size])
    return found, sent[:-1], reports


def full_report(rank: int) -> RankReport:
    """One whose numbers are as large as they can be, nearly."""
    return RankReport(
        compute_seconds=0.5 + rank,
        wait_seconds=2.0**-30,
        optimizer_seconds=2.0**30,
        data_seconds=0.0,
        read_ahead=2**31 - 1,
        largest_micro_batch=2**53 - 1 - rank,
        sizes_checksum=2**32 - 1,
        global_batch=-1 if rank else 2**53 - 1,
        optimizer_steps=2**53 + 1 + rank,
        samples_hash=2**48 - 1,
        problem=255,
        stop_signal=64,
        pauses=rank % 2,
    )


YES, NO, SOME_USED = [True] * 3, [False] * 3, [True, False, True]


@pytest.mark.parametrize("direct_ranks", [8, 1])
@pytest.mark.parametrize(
    ("usages", "expected", "rows"),
    [
        ([[ALL, NONE], [ALL, ALL], [NONE, NONE]], [YES, YES], 1),
        ([[ALL, NONE], [ALL, NONE], [NONE, NONE]], [YES, NO], 1),
        ([[ALL, SOME], [ALL, NONE], [NONE, NONE]], [YES, SOME_USED], 2),
        ([[ALL, SOME], [ALL, NONE], [NONE, ALL]], [YES, YES], 1),
        ([[SOME, []], [OTHERS, []], [NONE, []]], [YES, []], 2),
        ([[], [], []], [], 1),
    ],
    ids=["all", "none of one", "some of one", "some, and all on one rank", "no parameters", "no models"],
)
def test_ranks_know_who_used_a_parameter(workers, usages, expected, rows: int, direct_ranks: int) -> None:
    for used, sent, reports in workers(3).run(told, [usages] * 3, direct_ranks):
        assert used == [expected] * 3
        assert reports == [full_report(rank) for rank in range(3)]
        # The numbers, a byte for each model, and once a bit for each parameter of one that is used in part.
        report = 59 + len(expected)
        assert sent == [[report, 1][:rows], [report], [report]]


@pytest.mark.parametrize("direct_ranks", [8, 1])
def test_ranks_tell_again_what_has_changed(workers, direct_ranks: int) -> None:
    """Of three ranks: two use some parameters, then one others, one all; then as before; then a model has grown."""
    usages = [
        [[SOME], [OTHERS], [NONE]],
        [[SOME], [SOME], [NONE]],
        [[SOME], [SOME], [NONE]],
        [[ALL], [SOME], [NONE]],
        [[SOME], [SOME], [NONE]],
        [[NONE], [NONE], [NONE]],
        [[NONE], [SOME], [NONE]],
        [[[1.0, 0.0]], [[0.0, 0.0]], [[1.0, 0.0]]],
    ]
    expected = [YES, SOME_USED, SOME_USED, YES, SOME_USED, NO, SOME_USED, [True, False]]
    for used, sent, _ in workers(3).run(told, usages, direct_ranks):
        assert [each for [each] in used] == expected
        assert [len(rows) for rows in sent] == [2, 2, 1, 1, 1, 1, 2, 2]


def united(numbers: list[list[int]], direct_ranks: int) -> list[int]:
    """The bits that any rank has set."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(row_group, "DIRECT_RANKS", direct_ranks)
        group = RowGroup(shares_world=True)
        return group.unite(torch.tensor(numbers[dist.get_rank()], dtype=torch.uint8)).tolist()


@pytest.mark.parametrize("direct_ranks", [8, 1])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_bits_are_united(workers, size: int, length: int, direct_ranks: int) -> None:
    """Also where their bytes are not as many for each rank."""
    numbers = [[1 << (rank + place) % 8 for place in range(length)] for rank in range(size)]
    expected = [sum(column) for column in zip(*numbers, strict=True)]
    assert workers(size).run(united, numbers, direct_ranks) == [expected] * size
