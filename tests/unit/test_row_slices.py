# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Rows of weights in slices: every row is in one slice of one rank, however uneven chunks and slices are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate_lshdp.engine.stores.sliced.rows import RowSlices


@given(rows=st.integers(1, 60), ranks=st.integers(1, 6), slices=st.integers(1, 5))
def test_slices_are_a_partition_of_the_rows_as_torch_chunks_them(rows, ranks, slices):
    cut = RowSlices(rows, ranks, slices)
    matrix = torch.arange(2 * rows).view(2, rows)
    chunks = list(torch.arange(rows).chunk(ranks)) + [torch.arange(0)] * ranks  # torch leaves out empty ones
    slice_of, place = cut.find(torch.arange(rows))
    put, seen = torch.full_like(matrix, -1), []
    for index in range(cut.count):
        gathered = [
            torch.nn.functional.pad(own, (0, cut.size - len(own)), value=-1)
            for own in (chunks[rank][cut.own(rank, index)] for rank in range(ranks))
        ]
        wanted = torch.cat(gathered)
        assert len(wanted) == cut.gathered and (wanted >= 0).any()
        columns = cut.take_columns(matrix, index)
        assert torch.equal(columns[0], wanted.clamp(min=0)) and not columns[1][wanted < 0].any()
        cut.put_columns(put, index, columns)
        assert torch.equal(wanted[place[slice_of == index]], torch.arange(rows)[slice_of == index])
        seen += wanted[wanted >= 0].tolist()
    assert sorted(seen) == list(range(rows)) and torch.equal(put, matrix)
