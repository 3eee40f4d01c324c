# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Rows of many ranks, which are threads here, reach all of them in few rounds."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.dissemination import Dissemination, Gathering
from accelerate_lshdp.runtime.failures import CommunicationError


#: Rank 0 does not wait, and ends while the others have not called yet.
ENDING = """
import sys, time
import torch
import torch.distributed as dist
from accelerate_lshdp.runtime import row_group
from accelerate_lshdp.runtime.shutdown import install_clean_exit

row_group.DIRECT_RANKS = 1
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
install_clean_exit()
group = row_group.RowGroup()
dist.barrier()
time.sleep(0.0 if rank == 0 else 0.4)
work, rows = group.gather(torch.tensor([float(rank)]))
if rank:
    work.wait()
    assert rows.tolist() == [[0.0], [1.0], [2.0]]
"""


class Counting:
    """A group that counts what its rank sends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sent: list[int] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        self.sent.append(sum(tensor.nbytes for tensor in tensors))
        return self._group.send(tensors, rank, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def on_ranks(size: int, run: Callable[[int, Counting], Any], seconds: float = 60) -> list[Any]:
    """What ``run`` returns, or raises, on each rank of a group."""
    store = dist.HashStore()
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        group = Counting(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds)))
        try:
            found[rank] = run(rank, group)
        except BaseException as error:  # of a test, too
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("size", [2, 3, 8, 9, 13])
def test_all_ranks_get_all_rows(size: int) -> None:
    def run(rank: int, group: Counting) -> tuple[list[torch.Tensor], list[int]]:
        dissemination = Dissemination(group)
        begun = []
        for step in range(3):  # the second begins before the first has ended
            row = torch.tensor([rank, step, rank * step], dtype=torch.float64)
            begun.append(dissemination.gather(row))
            row.zero_()
        for gathering, _ in begun:
            gathering.wait()
        return [rows for _, rows in begun], group.sent

    for gathered, sent in on_ranks(size, run):
        for step, rows in enumerate(gathered):
            assert rows.tolist() == [[rank, step, rank * step] for rank in range(size)]
        # A row is 24 bytes; each rank sends as many rows as there are others, in as many messages as doublings.
        # With a byte that says that it has come.
        assert len(sent) == 3 * math.ceil(math.log2(size)) and sum(sent) == 3 * 25 * (size - 1)


@pytest.mark.parametrize("size", [2, 3, 8, 9, 13])
def test_all_ranks_get_the_bits_that_any_has_set(size: int) -> None:
    def run(rank: int, group: Counting) -> tuple[list[int], list[int]]:
        bits = torch.tensor([1 << rank % 8, 0, 1 << rank // 8], dtype=torch.uint8)
        gathering, united = Dissemination(group).unite(bits)
        bits.zero_()
        gathering.wait()
        return united.tolist(), group.sent

    first, last = [
        sum({1 << each for each in places}) for places in zip(*((r % 8, r // 8) for r in range(size)), strict=True)
    ]
    for united, sent in on_ranks(size, run):
        assert united == [first, 0, last]
        assert sent == [4] * math.ceil(math.log2(size))


@pytest.mark.parametrize("call", [Dissemination.gather, Dissemination.unite])
@pytest.mark.parametrize("lost", [0, 5])
def test_all_are_told_that_a_rank_is_gone(lost: int, call: Callable[..., tuple[Gathering, torch.Tensor]]) -> None:
    """Also those that would hear of it from another rank, which stays: long before the group's time is over."""
    connected, ended = threading.Barrier(9), threading.Barrier(9)

    def run(rank: int, group: Counting) -> float:
        connected.wait(60)
        if rank == lost:
            group._group = None  # closes its connections, as the end of a process does
            gc.collect()
            ended.wait(60)
            return 0.0
        dissemination, began = Dissemination(group), time.monotonic()
        for _ in range(2):  # and what comes after it
            with pytest.raises(CommunicationError):
                call(dissemination, torch.zeros(3, dtype=torch.uint8))[0].wait()
        seconds = time.monotonic() - began
        ended.wait(60)
        return seconds

    seconds = on_ranks(9, run, seconds=40)
    assert all(isinstance(each, float) and each < 20 for each in seconds), seconds


def test_a_process_that_ends_passes_on_what_others_wait_for(tmp_path: Path) -> None:
    """It has begun what it does not wait for; the others come later."""
    program = tmp_path / "rank.py"
    program.write_text(ENDING)
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=100)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs


def test_its_thread_ends_with_it() -> None:
    def run(rank: int, group: Counting) -> None:
        Dissemination(group).gather(torch.zeros(1))[0].wait()

    on_ranks(2, run)
    served = [thread for thread in threading.enumerate() if thread.name == "dissemination"]
    for thread in served:
        thread.join(10)
    assert not any(thread.is_alive() for thread in served)
