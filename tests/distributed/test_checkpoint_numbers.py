# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Automatic checkpoint naming: numbers go on after a resume, and `total_limit` keeps what is newest."""

from __future__ import annotations

import errno
import logging
import os
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from test_checkpoint_files import leave, names, put
from torch import nn

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.accelerator import run_checkpoints
from accelerate_lshdp.checkpoint.folder import MANIFEST
from accelerate_lshdp.checkpoint.numbers import drop_oldest, next_number


def run(
    folder: str, saves: int, load: str | None = None, iteration: int | None = None, limit: int | None = 2
) -> tuple[list[str], int, list[int]]:
    """A run that loads ("" for the newest), then saves after each of some steps; what is in the folder at its end."""
    folder = folder.format(node=os.environ["GROUP_RANK"])
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = LSHDPAccelerator(project_config=project)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if load is not None:
        accelerator.load_state(os.path.join(folder, "checkpoints", load) if load else None)
    start = accelerator.completed_steps
    if iteration is not None:
        accelerator.project_configuration.iteration = iteration
    for _ in range(saves):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        accelerator.wait_for_everyone()
    found = names(os.path.join(folder, "checkpoints"))
    accelerator.load_state()
    return found, start, [accelerator.completed_steps, accelerator.save_iteration]


def test_numbers_go_on_after_a_resume_and_after_another_one(workers, tmp_path):
    assert workers(1).run(run, str(tmp_path), 3)[0] == (["checkpoint_1", "checkpoint_2"], 0, [3, 3])
    assert workers(1).run(run, str(tmp_path), 1, "")[0] == (["checkpoint_2", "checkpoint_3"], 3, [4, 4])
    assert workers(1).run(run, str(tmp_path), 3, "")[0] == (["checkpoint_5", "checkpoint_6"], 4, [7, 7])


def run_where_nothing_can_be_removed(folder: str) -> tuple[tuple[list[str], int, list[int]], list[str]]:
    """As `run`, where a rank that removes old checkpoints may not."""

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    handler = BufferingHandler(100)
    logger, drop = logging.getLogger(run_checkpoints.__name__), run_checkpoints.drop_oldest
    logger.addHandler(handler)
    run_checkpoints.drop_oldest = denied
    try:
        return run(folder, 2, limit=1), [record.getMessage() for record in handler.buffer]
    finally:
        run_checkpoints.drop_oldest = drop
        logger.removeHandler(handler)


def test_old_checkpoints_that_cannot_be_removed_do_not_end_a_run(workers, tmp_path):
    """The new one is complete: whoever writes it says so, and no rank waits for another one that has stopped."""
    (one, warned), (other, silent) = workers(2).run(run_where_nothing_can_be_removed, str(tmp_path), nodes=(2,))
    assert one == other == (["checkpoint_0", "checkpoint_1"], 0, [2, 2])
    assert len(warned) == 2 and "an old checkpoint could not be removed" in warned[0] and not silent


def test_what_is_newest_stays_whatever_its_number(workers, tmp_path):
    """A run that went back to an earlier checkpoint, and one whose user chose a number in a gap."""
    workers(1).run(run, str(tmp_path), 4, None, None, None)
    found = workers(1).run(run, str(tmp_path), 1, "checkpoint_1", None, 4)[0]
    assert found == (["checkpoint_1", "checkpoint_2", "checkpoint_3", "checkpoint_4"], 2, [3, 5])
    os.rename(tmp_path / "checkpoints" / "checkpoint_4", tmp_path / "checkpoints" / "checkpoint_9")
    found = workers(1).run(run, str(tmp_path), 1, "", 6)[0]
    assert found == (["checkpoint_6", "checkpoint_9"], 3, [4, 10])


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_a_number_that_is_taken_is_never_replaced(workers, tmp_path, nodes):
    folder = str(tmp_path / "node{node}")
    workers(2).run(run, folder, 2, nodes=nodes)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(f"*/{MANIFEST}")}
    assert len(before) == 2 * len(nodes)
    errors = workers(2).run(run, folder, 1, nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "checkpoint_0, expected a number that is free" in errors[0].message and "load_state" in errors[0].message
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob(f"*/{MANIFEST}")} == before


def test_nodes_agree_on_the_number(workers, tmp_path):
    """Node 1 is new: it has no checkpoint, gets the newest one, and goes on with node 0's numbers."""
    folder = str(tmp_path / "node{node}")
    workers(1).run(run, folder, 3)
    found = workers(2).run(run, folder, 1, "", nodes=(1, 1))
    assert found == [(["checkpoint_2", "checkpoint_3"], 3, [4, 4])] * 2


def test_the_order_is_what_checkpoints_say(tmp_path):
    for number, generation in ((3, 1), (7, 2), (0, 3), (1, 4)):
        put(tmp_path / f"checkpoint_{number}", number + 1, generation=generation)
    put(tmp_path / "best", 9, generation=0)
    (tmp_path / "checkpoint_2").mkdir()  # of another library
    (tmp_path / "checkpoint_2" / "weights").write_text("precious")
    for path in tmp_path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert next_number(tmp_path) == 8
    drop_oldest(tmp_path, 2)
    assert names(tmp_path) == ["best", "checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert (tmp_path / "checkpoint_2" / "weights").exists()


def test_what_is_damaged_goes_first(tmp_path):
    for number in range(3):
        put(tmp_path / f"checkpoint_{number}", number + 1)
    (tmp_path / "checkpoint_2" / MANIFEST).write_text("{")
    drop_oldest(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1"]


def test_a_number_that_a_killed_writer_took_is_taken(tmp_path: Path):
    leave(tmp_path / "checkpoint_4", 4)
    assert next_number(tmp_path) == 5
    assert next_number(tmp_path / "nowhere") == 0
