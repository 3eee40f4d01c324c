# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Killed writers, lost and damaged copies, full disks: nodes agree on the newest complete checkpoint, or all stop."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from checkpoint_cases import assert_same, full_state, layout, node_folder, objects, run_until_killed, visible

from accelerate_lshdp.checkpoint import run_state as checkpoint
from accelerate_lshdp.checkpoint import transfer as checkpoint_transfer
from accelerate_lshdp.checkpoint.folder import MANIFEST, Manifest
from accelerate_lshdp.checkpoint.run_state import load_checkpoint, newest_checkpoint, save_checkpoint
from accelerate_lshdp.checkpoint.tensors import SafetensorsWriter
from accelerate_lshdp.runtime import object_exchange as checkpoint_exchange


def kill_this_process(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def killed_after_tensors(count):
    """This process dies in the middle of a file."""
    original, written = SafetensorsWriter.write, []

    def write(self, name, tensor):
        written.append(name)
        if len(written) > count:
            kill_this_process()
        original(self, name, tensor)

    with mock.patch.object(SafetensorsWriter, "write", write):
        yield


@contextmanager
def killed_between_renames():
    original, renamed = os.rename, []

    def rename(source, target):
        if renamed:
            kill_this_process()
        renamed.append(source)
        original(source, target)

    with mock.patch.object(os, "rename", rename):
        yield


@contextmanager
def limited_file_size(size):
    """Writing more than `size` bytes to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def do_save(training, folder, step):
    save_checkpoint(folder, training, layout(), plan_digest="p", step=step, samples_seen=step, seed=0)


def save(root, step, name="a", kind="flat", trouble=None, node=1):
    """Saves with trouble on one node's writer; returns the state that was saved."""
    training = objects(kind, seed=step, steps=1)
    state = full_state(training)
    here = layout()
    troubled = trouble is not None and here.node == node and here.local_rank == 0
    if not troubled:
        do_save(training, node_folder(root) / name, step)
    elif trouble == "mid-write":
        with killed_after_tensors(4):
            do_save(training, node_folder(root) / name, step)
    elif trouble == "before rename":
        with mock.patch.object(checkpoint, "commit", kill_this_process):
            do_save(training, node_folder(root) / name, step)
    elif trouble == "between renames":
        with killed_between_renames():
            do_save(training, node_folder(root) / name, step)
    elif trouble == "full disk":
        with limited_file_size(600):
            do_save(training, node_folder(root) / name, step)
    return state


def load(root, name="", kind="flat", chunk=None, staged=False):
    training = objects(kind, seed=77)
    found = newest_checkpoint(node_folder(root) / name, layout())
    with mock.patch.object(checkpoint_transfer, "CHUNK_BYTES", chunk or checkpoint_transfer.CHUNK_BYTES):
        # As with nccl, which carries the device's tensors only; here the device is the CPU.
        carries = mock.patch.object(checkpoint_exchange, "host_backend", lambda: "gloo")
        with carries if staged else mock.MagicMock():
            loaded = load_checkpoint(node_folder(root) / name, training, layout(), plan_digest="p")
    assert loaded.path == found
    return full_state(training), loaded.step


def check_loads(pool, root, states, step, nodes, **options):
    for state, found in pool.run(load, root, options.get("name", ""), "flat", *options.get("more", ()), nodes=nodes):
        assert found == step
        assert_same(state, states[step])


def both_saved(pool, root, steps, nodes, name=None):
    return {step: pool.run(save, root, step, name or f"step_{step}", nodes=nodes)[0] for step in steps}


@pytest.mark.parametrize(
    ("trouble", "node"),
    [
        ("between renames", 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("mid-write", 0), ("mid-write", 1), ("before rename", 1))
        ),
    ],
)
def test_a_writer_is_killed(workers, tmp_path, trouble, node):
    """Whatever the moment: the final name holds the old checkpoint or the new one, and both nodes resume alike."""
    pool, nodes = workers(2), (1, 1)
    states = both_saved(pool, tmp_path, [1], nodes, name="a")
    codes = run_until_killed(save, tmp_path, 2, "a", "flat", trouble, node, nodes=nodes, folder=tmp_path)
    assert codes[node] == -signal.SIGKILL and codes[1 - node] == 1
    for number in range(2):
        final = tmp_path / f"node{number}" / "a"
        if final.exists():
            manifest = Manifest.read(final)
            assert all((final / name).stat().st_size == file.bytes for name, file in manifest.files.items())
        else:
            assert trouble == "between renames" and number == node
    assert len(visible(tmp_path / f"node{node}")) == 3  # what is left is hidden, beside its lock
    step = 1 if trouble == "mid-write" else 2
    answers = pool.run(load, tmp_path, "a", nodes=nodes)
    assert [found for _, found in answers] == [step, step]
    assert_same(answers[0][0], answers[1][0])
    if step == 1:
        assert_same(answers[0][0], states[1])
    states = both_saved(pool, tmp_path, [3], nodes, name="a")
    assert [visible(tmp_path / f"node{number}") for number in range(2)] == [["a"], ["a"]]
    check_loads(pool, tmp_path, states, 3, nodes)


@pytest.mark.parametrize("name", ["a", None])
def test_one_node_has_an_older_save(workers, tmp_path, name):
    """A has save 2, B has save 1, under the same name or another one: the newest complete one wins everywhere."""
    pool, nodes = workers(2), (1, 1)
    states = both_saved(pool, tmp_path, [1], nodes, name)
    older = tmp_path / "older"
    shutil.copytree(tmp_path / "node1", older)
    states |= both_saved(pool, tmp_path, [2], nodes, name)
    shutil.rmtree(tmp_path / "node1")
    older.rename(tmp_path / "node1")
    check_loads(pool, tmp_path, states, 2, nodes)
    assert visible(tmp_path / "node1") == (["a"] if name else ["step_1", "step_2"])


def test_the_last_save_wins_even_if_its_step_is_smaller(workers, tmp_path):
    pool, nodes = workers(2), (1, 1)
    states = both_saved(pool, tmp_path, [9, 4], nodes)
    check_loads(pool, tmp_path, states, 4, nodes)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("staged", [False, True])
def test_a_node_without_it_gets_it_in_chunks(workers, tmp_path, missing, staged):
    pool, nodes = workers(3), (1, 2)
    states = both_saved(pool, tmp_path, [1, 2], nodes)
    shutil.rmtree(tmp_path / f"node{missing}")
    check_loads(pool, tmp_path, states, 2, nodes, more=(100, staged))
    assert visible(tmp_path / f"node{missing}") == ["step_2"]
    copies = [tmp_path / f"node{node}" / "step_2" for node in range(2)]
    assert visible(copies[0]) == visible(copies[1])
    assert all((copies[0] / name).read_bytes() == (copies[1] / name).read_bytes() for name in visible(copies[0]))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["model_0.safetensors", "training.json", MANIFEST])
def test_a_damaged_copy_is_replaced_by_a_good_one(workers, tmp_path, file):
    pool, nodes = workers(2), (1, 1)
    states = both_saved(pool, tmp_path, [1, 2], nodes)
    path = tmp_path / "node0" / "step_2" / file
    good = path.read_bytes()
    if file == MANIFEST:
        path.write_bytes(good[: len(good) // 2])
    else:
        damage(path)
    check_loads(pool, tmp_path, states, 2, nodes)
    assert path.read_bytes() == good


def test_damaged_everywhere_falls_back_to_the_one_before(workers, tmp_path):
    pool, nodes = workers(2), (1, 1)
    states = both_saved(pool, tmp_path, [1, 2], nodes)
    for node in range(2):
        damage(tmp_path / f"node{node}" / "step_2" / "optimizer_0.safetensors")
    check_loads(pool, tmp_path, states, 1, nodes)
    errors = pool.run(load_only, tmp_path, "step_2", nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1
    for part in ("there is no complete checkpoint there", "node 0", "node 1", "checksum does not match"):
        assert part in errors[0].message


def load_only(root, name=""):
    load_checkpoint(node_folder(root) / name, objects("flat"), layout(), plan_digest="p")


def test_nothing_to_load(workers, tmp_path):
    assert workers(2).run(find, tmp_path, nodes=(1, 1)) == [None, None]
    errors = workers(2).run(load_only, tmp_path, nodes=(1, 1), expect_failure=True)
    assert all("there is no complete checkpoint there: no node has any" in error.message for error in errors)


def find(root):
    return newest_checkpoint(node_folder(root), layout())


def receive(root, trouble):
    training = objects("flat")
    if trouble == "killed" and layout().node == 1:
        with mock.patch.object(checkpoint_transfer, "_to_disk", kill_this_process):
            load_checkpoint(node_folder(root), training, layout(), plan_digest="p")
    with limited_file_size(600):
        load_checkpoint(node_folder(root), training, layout(), plan_digest="p")


@pytest.mark.parametrize("trouble", ["killed", "full disk"])
def test_receiving_fails(workers, tmp_path, trouble):
    pool, nodes = workers(2), (1, 1)
    states = both_saved(pool, tmp_path, [1], nodes)
    shutil.rmtree(tmp_path / "node1")
    if trouble == "killed":
        codes = run_until_killed(receive, tmp_path, trouble, nodes=nodes, folder=tmp_path)
        assert codes == [1, -signal.SIGKILL]
        assert all(name.startswith(".") for name in visible(tmp_path / "node1"))
    else:
        errors = pool.run(receive, tmp_path, trouble, nodes=nodes, expect_failure=True)
        assert all(
            "rank 1: sending checkpoint step_1 " in error.message and "OSError" in error.message for error in errors
        )
        assert visible(tmp_path / "node1") == []
    check_loads(pool, tmp_path, states, 1, nodes)


@pytest.mark.parametrize("node", [0, 1])
def test_a_full_disk_stops_all_ranks_and_leaves_the_old_checkpoint(workers, tmp_path, node):
    pool, nodes = workers(3), (1, 2)
    states = both_saved(pool, tmp_path, [1], nodes, "a")
    errors = pool.run(save, tmp_path, 2, "a", "flat", "full disk", node, nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert errors[0].message.startswith(f"rank {node}: writing checkpoint ") and "OSError" in errors[0].message
    assert [visible(tmp_path / f"node{number}") for number in range(2)] == [["a"], ["a"]]
    check_loads(pool, tmp_path, states, 1, nodes)


def test_a_folder_that_cannot_be_written_stops_all_ranks(workers, tmp_path):
    (tmp_path / "node1").write_text("a file where a folder should be")
    errors = workers(2).run(save, tmp_path, 1, nodes=(1, 1), expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "rank 1: " in errors[0].message and "node1" in errors[0].message
    assert visible(tmp_path / "node0") == []


def test_a_folder_of_the_user_is_not_replaced(workers, tmp_path):
    precious = tmp_path / "node1" / "a" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("")
    errors = workers(2).run(save, tmp_path, 1, nodes=(1, 1), expect_failure=True)
    assert all("is not empty and is not a checkpoint" in error.message for error in errors)
    assert precious.exists() and visible(tmp_path / "node0") == []
