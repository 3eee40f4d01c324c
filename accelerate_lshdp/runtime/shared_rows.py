# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SharedRows`: rows that ranks send each other without waiting, and values that they leave for those that want them.

A rank that has what it needs does not wait for the rows of others. So what only some of them want cannot be sent by a
collective of its own: it lies in the store of the launch, from which it is fetched without the rank that has left it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.agreement import store_of_launch
from accelerate_lshdp.runtime.dissemination import Gathering
from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.row_group import RowGroup
from accelerate_lshdp.runtime.wait_clock import WaitClock


class PendingRows:
    """Rows of bytes, one a rank, while they are being exchanged; ranks that do not need them need not wait.

    Args:
        work: the exchange; None: there is one rank.
        rows: shape (ranks, bytes).
        own: this rank, and what it leaves for others beside its row; None: nothing.
        key: that of this exchange in the store of the launch.
        clock: counts the time that it blocks.
    """

    def __init__(
        self,
        work: dist.Work | Gathering | None,
        rows: torch.Tensor,
        own: tuple[int, bytes | None],
        key: str,
        clock: WaitClock,
    ) -> None:
        self._work = work
        self._rows = rows
        self._rank, self._values = own
        self._key = key
        self._clock = clock

    def wait(self) -> torch.Tensor:
        """Waits for the rows of all ranks; shape (ranks, bytes)."""
        if self._work is not None:
            with self._clock.waiting():
                self._work.wait()
            self._work = None
        return self._rows

    def values_of(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """What ranks have left beside their rows, which have come and say so."""
        found = {rank: self._values or b"" for rank in ranks if rank == self._rank}
        others = [rank for rank in ranks if rank != self._rank]
        if others:
            with self._clock.waiting(), failures_explained():
                left = store_of_launch().multi_get([_key_of(self._key, rank) for rank in others])
            found.update(zip(others, left, strict=True))
        return found


class SharedRows:
    """Rows of all ranks, over a group of their own (collective to make).

    Where other ranks send no row, one must not be matched with their gradients.
    """

    def __init__(self) -> None:
        self._group = RowGroup()
        # A world that is made again in the same process may meet the keys of the one before in the same store.
        work, tokens = self._group.gather(torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8))
        work.wait()
        self._token = tokens[0].numpy().tobytes().hex()
        self._shared = 0

    def share(self, row: torch.Tensor, values: bytes | None, clock: WaitClock) -> PendingRows:
        """Begins to send a row to every rank; does not wait.

        Args:
            row: uint8, as many bytes on all ranks.
            values: to be fetched by ranks that want them; the row has to say that there are some. None: there are not.
            clock: counts the time that it blocks.
        """
        self._shared += 1
        key, rank = f"lshdp/rows {self._token} {self._shared}", dist.get_rank()
        if values is not None:
            with clock.waiting(), failures_explained():
                store_of_launch().set(_key_of(key, rank), values)
        work, rows = self._group.gather(row)
        return PendingRows(work, rows, (rank, values), key, clock)


def _key_of(key: str, rank: int) -> str:
    """Where a rank leaves values."""
    return f"{key} of rank {rank}"
