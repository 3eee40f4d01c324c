# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`RowSlices`: which rows of a weight, cut among ranks, are gathered together as one slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowSlices:
    """The slices of a matrix whose rows are cut among ranks in equal chunks, rounded up, as by ``torch.chunk``.

    Slice j is the j-th part of every rank's chunk. Gathered, the parts lie one after the other in the order of the
    ranks, each with as many places as the largest: short chunks are padded, as FSDP2 pads its shards.

    Args:
        rows: of the whole matrix.
        ranks: that share it.
        slices: that are wanted.
        multiple: rows of a slice are a multiple of this number, but for the last one's.
    """

    rows: int
    ranks: int
    slices: int
    multiple: int = 1

    @property
    def chunk(self) -> int:
        """Rows of a rank; the last ranks may have fewer, or none."""
        return -(-self.rows // self.ranks)

    @property
    def size(self) -> int:
        """Rows of a rank that are in one slice, padding included."""
        return -(-self.chunk // (self.slices * self.multiple)) * self.multiple

    @property
    def count(self) -> int:
        """Number of slices that have rows; fewer than wanted where chunks are too short for so many."""
        return -(-self.chunk // self.size)

    @property
    def gathered(self) -> int:
        """Rows of one gathered slice, padding included."""
        return self.ranks * self.size

    def own(self, rank: int, index: int) -> slice:
        """The rows of slice ``index`` among those of a rank's own chunk."""
        length = min(self.chunk, max(0, self.rows - rank * self.chunk))
        return slice(min(index * self.size, length), min((index + 1) * self.size, length))

    def spans(self, index: int) -> Iterator[tuple[int, int, int]]:
        """The runs of rows in slice ``index``: (place in the gathered slice, first row, row after the last)."""
        for rank in range(self.ranks):
            own = self.own(rank, index)
            if own.start < own.stop:
                yield rank * self.size, rank * self.chunk + own.start, rank * self.chunk + own.stop

    def take_columns(self, matrix: torch.Tensor, index: int) -> torch.Tensor:
        """The columns of a matrix that belong to the rows of a slice.

        Args:
            matrix: shape (n, rows).
            index: of the slice.

        Returns:
            A copy, shape (n, gathered), zeros where there is padding.
        """
        taken = matrix.new_zeros(matrix.shape[0], self.gathered)
        for place, start, stop in self.spans(index):
            taken[:, place : place + stop - start] = matrix[:, start:stop]
        return taken

    def put_columns(self, matrix: torch.Tensor, index: int, columns: torch.Tensor) -> None:
        """Writes a slice's ``columns``, shape (n, gathered), to their places in ``matrix``, shape (n, rows)."""
        for place, start, stop in self.spans(index):
            matrix[:, start:stop] = columns[:, place : place + stop - start]

    def find(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slice of each of some rows, and its place in the gathered slice; both of the shape of ``rows``."""
        rank = rows.div(self.chunk, rounding_mode="floor")
        within = rows - rank * self.chunk
        index = within.div(self.size, rounding_mode="floor")
        return index, rank * self.size + within - index * self.size
