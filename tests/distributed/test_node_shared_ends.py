# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ranks that share memory notice it when one of them ends, fails or hangs, and leave nothing that hides their end."""

from __future__ import annotations

import gc
import mmap
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import run_until_killed
from node_shared_cases import start
from torch.utils.data import DataLoader, Dataset
from training_cases import collate

from accelerate_lshdp.engine.stores.shared import memory as node_memory
from accelerate_lshdp.engine.stores.shared.bucket import GradientSource, SharedBucket
from accelerate_lshdp.engine.stores.shared.memory import Layout, NodeMemory, NodeMemoryError, OtherNodeRankError
from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction
from accelerate_lshdp.engine.stores.shared.table import BarrierPurpose, NodeTable
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.runtime.failures import follows_another
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


def end_early(how: str, folder: Path) -> None:
    """Rank 1 ends in its second step, in the middle of the backward if it does not just leave the loop."""
    accelerator, model, optimizer, loader = start()
    rank = accelerator.process_index
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())

    def end(gradient: torch.Tensor) -> None:
        if how == "raises":
            raise ValueError("a mistake of the script")
        os.kill(os.getpid(), {"is killed": signal.SIGKILL, "hangs": signal.SIGSTOP}[how])

    try:
        for step, batch in enumerate(loader):
            if step == 1 and rank == 1:
                if how == "leaves":
                    break
                model.inner[1].weight.register_hook(end)
            accelerator.backward(model(**batch))
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        # By the kind of error launchers know which rank's output says why.
        (folder / f"error-{rank}").write_text(f"{follows_another(error)}: {error}")
        if how == "hangs":
            os.kill(pids[1], signal.SIGKILL)
        raise


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("is killed", -signal.SIGKILL, "True: local rank 1 of this node has ended, but was to"),
        ("raises", 1, "local rank 1 of this node (failed|has ended)"),
        ("leaves", 0, "True: local rank 1 of this node has ended, but was to"),
        pytest.param(
            "hangs",
            -signal.SIGKILL,
            "False: waited 5 s for the other ranks of this node to .* One of them hangs",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_others_notice_that_a_rank_has_ended(tmp_path, how, code, message):
    timeout = 5 if how == "hangs" else 60
    codes = run_until_killed(end_early, how, tmp_path, nodes=(2,), folder=tmp_path, timeout=timeout)
    assert codes == [1, code]
    assert re.search(message, (tmp_path / "error-0").read_text())


class Broken(GradientReduction):
    def __init__(self) -> None:
        super().__init__(None)

    def start(self, buffer: torch.Tensor, index: int, shapes: list[torch.Size]) -> PendingReduction:
        raise RuntimeError("the cable is out")


@pytest.fixture
def lonely_rank() -> Iterator[NodeReduction]:
    """A node of one rank with one bucket, which cannot be summed between nodes."""
    layout = Layout()
    place = layout.place(16)
    table = NodeTable(1, 1, 1, layout)
    memory = NodeMemory(mmap.mmap(-1, layout.bytes), os.memfd_create("unused"), {}, 0)
    table.map(memory)
    buffer = memory.tensor(place, (4,), torch.float32)
    reduction = NodeReduction(memory, table, [SharedBucket(buffer, [buffer], 0, Broken())], WaitClock(), 20.0)
    yield reduction
    reduction.close()


def test_an_error_of_the_thread_reaches_the_training_loop(lonely_rank):
    lonely_rank.begin()
    lonely_rank.ready(0, [torch.ones(4)], [True], True)
    with pytest.raises(RuntimeError, match="summing gradients on this node failed: the cable is out"):
        lonely_rank.finish(True, lambda index: None)
    lonely_rank.abandon()
    with pytest.raises(RuntimeError, match="the cable is out"):
        lonely_rank.begin()


def test_a_rank_may_end_when_it_has_done_its_part(lonely_rank):
    """It is seen to be gone after the last look at what it has done: then there is more to see."""
    lonely_rank._memory.gone.add(1)
    looks = iter([False, True, True])
    lonely_rank._wait(lambda: next(looks), "add its gradients")
    with pytest.raises(NodeMemoryError, match="local rank 1 of this node has ended, but was to add its gradients"):
        lonely_rank._wait(lambda: False, "add its gradients")


class Slow(GradientSource):
    def bring(self, noted: object, copied: tuple, summed: tuple) -> None:
        time.sleep(0.3)
        super().bring(noted, copied, summed)


@pytest.fixture
def second_rank() -> Iterator[tuple[NodeReduction, NodeTable, socket.socket]]:
    """The second rank of a node with one bucket, which it owns; the table, and the first rank's end of the socket."""
    layout = Layout()
    place = layout.place(16)
    table = NodeTable(2, 1, 1, layout)
    own, other = socket.socketpair()
    memory = NodeMemory(mmap.mmap(-1, layout.bytes), os.memfd_create("unused"), {0: own}, 1)
    table.map(memory)
    buffer = memory.tensor(place, (4,), torch.float32)
    bucket = SharedBucket(buffer, [buffer], 1, None)
    reduction = NodeReduction(memory, table, [bucket], WaitClock(), 20.0, source=Slow())
    yield reduction, table, other
    reduction.close()
    other.close()


def test_a_rank_may_end_while_the_next_one_still_adds(second_rank):
    """It has added its part, and fails: nobody waits for it, and it is its own error that is to be seen."""
    reduction, table, other = second_rank
    reduction.begin()
    table.entered[0] = table.added[0, 0] = 1
    other.close()
    reduction.ready(0, [torch.ones(4)], [True], False)
    reduction.finish(False, lambda index: None)
    assert reduction._buckets[0].buffer.tolist() == [1.0] * 4
    # Of a part that the other one has not added, it is.
    reduction.begin()
    reduction.ready(0, [torch.ones(4)], [True], False)
    with pytest.raises(NodeMemoryError, match="local rank 0 of this node has ended, but was to add its gradients"):
        reduction.finish(False, lambda index: None)


def test_a_rank_may_fail_in_its_next_backward_while_others_end_this_one(second_rank):
    """It has added its part of this one, and all ranks fail in the next one together."""
    reduction, table, _ = second_rank
    reduction.begin()
    table.entered[0], table.added[0, 0] = 2, 1
    table.failed[0] = 2
    reduction.ready(0, [torch.ones(4)], [True], True)
    reduction.finish(True, lambda index: None)
    # In a backward that it has failed itself, it has not added anything.
    reduction.begin()
    reduction.ready(0, [torch.ones(4)], [True], True)
    with pytest.raises(OtherNodeRankError, match="the backward of local rank 0 of this node failed"):
        reduction.finish(True, lambda index: None)


def test_a_rank_that_is_elsewhere_is_an_error_of_the_script(second_rank):
    """Also where a backward of this rank has failed before, or the other one ends afterwards."""
    reduction, table, _ = second_rank
    table.collectives[0] = 1
    table.failed[1] = 1
    with pytest.raises(NodeMemoryError, match="has gone on to its next gather") as caught:
        reduction.barrier(BarrierPurpose.STEP_BEGINS)
    assert not follows_another(caught.value)
    with pytest.raises(NodeMemoryError, match="has gone on to its next gather"):
        reduction.barrier(BarrierPurpose.STEP_BEGINS)


def test_the_loss_of_a_rank_is_known_as_such_at_later_barriers(second_rank):
    reduction, _, other = second_rank
    other.close()
    for _ in range(2):  # the script may have handled the first one
        with pytest.raises(OtherNodeRankError, match="local rank 0 of this node has ended") as caught:
            reduction.barrier(BarrierPurpose.STEP_BEGINS)
        assert follows_another(caught.value)


class Connections(Dataset):
    """How many connections between ranks a worker of a loader keeps open."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ends = [end for memory in node_memory._memories for end in memory._peers.values()]
        assert len(ends) == 1
        return {"inputs": torch.full((4,), float(ends[0].fileno()), dtype=torch.float64)}


def train_with_loading_processes() -> list[float]:
    gc.collect()  # models of cases before this one, in this process, and their connections
    accelerator, model, optimizer, _ = start()
    loader = accelerator.prepare(DataLoader(Connections(), batch_size=1, collate_fn=collate, num_workers=1))
    seen = []
    for batch in loader:
        accelerator.backward(model(**batch))
        optimizer.step()
        seen += batch["inputs"].flatten().tolist()
    return seen


def test_processes_that_load_data_keep_no_connection_open(workers):
    for seen in workers(2).run(train_with_loading_processes):
        assert seen and set(seen) == {-1.0}


def make_memory(trouble: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0 and trouble == "no memory":
            patch.setattr(os, "posix_fallocate", refuse)
        if rank == 1 and trouble == "no socket":
            patch.setattr(node_memory, "_listener", refuse)
        patch.setattr(node_memory, "_CONNECT_SECONDS", 1.0)
        NodeMemory.create(Topology(rank, (world,)), 4096)


def refuse(*_: object) -> None:
    raise OSError(28, "nothing left")


@pytest.mark.parametrize("trouble", ["no memory", "no socket"])
def test_a_node_that_cannot_share_memory_says_so_on_all_ranks(workers, trouble):
    errors = workers(2).run(make_memory, trouble, expect_failure=True, timeout=20)
    assert all("cannot share memory" in error.message and "nothing left" in error.message for error in errors)
    assert all("intra_node='collectives'" in error.message for error in errors)
