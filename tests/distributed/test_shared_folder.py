# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Nodes and runs that share a folder of checkpoints: what one removes between another's two looks, and sees late."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_cases import assert_same, full_state, layout, objects, visible
from test_checkpoint_files import fill, leave, names, put

from accelerate_lshdp.checkpoint import folder as checkpoint_files
from accelerate_lshdp.checkpoint import run_state as checkpoint
from accelerate_lshdp.checkpoint import shared_folder
from accelerate_lshdp.checkpoint.folder import (
    Manifest,
    commit,
    drop,
    newest_generation,
    partial_folder,
    recover,
    remove_leftovers,
    search,
    token_path,
)
from accelerate_lshdp.checkpoint.lock import lock_path
from accelerate_lshdp.checkpoint.numbers import drop_oldest
from accelerate_lshdp.checkpoint.run_state import load_checkpoint, save_checkpoint
from accelerate_lshdp.checkpoint.shared_folder import remove_tree, wait_until


OLD = time.time() - 7200


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def vanishes_when_listed(monkeypatch: pytest.MonkeyPatch, victim: Path) -> None:
    """Another node removes `victim` just after this one has listed its folder."""
    listdir = os.listdir

    def listing(folder: str | os.PathLike[str] = ".") -> list[str]:
        found = listdir(folder)
        if Path(folder) == victim.parent and victim.name in found and victim.exists():
            remove(victim)
        return found

    monkeypatch.setattr(os, "listdir", listing)


def vanishes_when_looked_at(monkeypatch: pytest.MonkeyPatch, victim: Path) -> None:
    """Another node removes `victim` just before this one looks at what it has listed."""
    stat = os.stat

    def looking(path: object, **options: object) -> os.stat_result:
        if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(victim):
            monkeypatch.setattr(os, "stat", stat)
            remove(victim)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", looking)


def is_stale(monkeypatch: pytest.MonkeyPatch, victim: Path) -> None:
    """As a network file system says of what another node has removed."""
    stat = os.stat

    def stale(path: object, **options: object) -> os.stat_result:
        if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(victim):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", stale)


def is_private(monkeypatch: pytest.MonkeyPatch, victim: Path) -> None:
    """As the system says of a folder of another user that nobody else may look into, or of a file of theirs."""
    for name in ("stat", "lstat", "open", "listdir", "scandir", "unlink", "rename"):
        call = getattr(os, name)

        def denied(path: object = ".", *args: object, call: Callable = call, name: str = name, **options: object):
            inside = isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(victim)
            if inside and (Path(path) != victim or name not in ("stat", "lstat")):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *args, **options)

        monkeypatch.setattr(os, name, denied)


def old_token(folder: Path) -> Path:
    token = token_path(folder / "a", "0" * 32, 1)
    token.touch()
    os.utime(token, (OLD, OLD))
    return token


LOOKS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "a token": (old_token, remove_leftovers),
    "a leftover": (lambda folder: leave(folder / "b", 5, complete=False), remove_leftovers),
    "a complete leftover": (lambda folder: leave(folder / "b", 5), remove_leftovers),
    "a checkpoint, searching": (lambda folder: folder / "a", search),
    "a leftover, searching": (lambda folder: leave(folder / "b", 5), search),
    "a checkpoint, counting": (lambda folder: folder / "a", newest_generation),
    "a numbered one": (lambda folder: folder / "checkpoint_1", lambda folder: drop_oldest(folder, 1)),
}


@pytest.mark.parametrize("way", [vanishes_when_listed, vanishes_when_looked_at, is_stale, is_private])
@pytest.mark.parametrize("name", LOOKS)
def test_what_vanishes_or_is_of_another_user_is_no_error(tmp_path, monkeypatch, name, way):
    put(tmp_path / "a", 1)
    for number in (1, 2, 3):
        put(tmp_path / f"checkpoint_{number}", number + 1)
    make, look = LOOKS[name]
    victim = make(tmp_path)
    way(monkeypatch, victim)
    look(tmp_path)
    monkeypatch.undo()
    assert Manifest.read(tmp_path / "checkpoint_3").step == 4
    assert search(tmp_path)


def test_the_folder_that_is_asked_for_has_to_be_readable(tmp_path, monkeypatch):
    put(tmp_path / "a", 1)
    is_private(monkeypatch, tmp_path / "a")
    with pytest.raises(PermissionError):
        search(tmp_path / "a")


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path, monkeypatch):
    """It may hold a newer checkpoint, so that it is not passed over without a word."""
    put(tmp_path / "a", 1)
    put(tmp_path / "b", 2)
    is_private(monkeypatch, tmp_path / "b")
    found = {item.relative: item.problem for item in search(tmp_path)}
    assert found["a"] is None and "belongs to another user, who lets nobody look into it" in found["b"]


@pytest.fixture
def folder_of_all_users() -> Iterator[Path]:
    """As /tmp: anybody writes there, and removes only what is theirs."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_folder_with_things_of_another_user(folder_of_all_users):
    root = folder_of_all_users
    (root / "systemd-private").mkdir(mode=0o700)
    leave(root / "open", 1), leave(root / "open", 2, kind="replaced"), leave(root / "closed", 3).chmod(0o700)
    old_token(root)
    before = names(root)
    os.seteuid(65534)
    try:
        remove_leftovers(root)
        assert names(root) == before
        put(root / "mine", newest_generation(root) + 1)
        assert Manifest.read(root / "mine").generation == 3
        assert [found.manifest.step for found in search(root / "mine")] == [3]
        assert {found.relative for found in search(root) if found.manifest} == {"mine", "open"}
    finally:
        os.seteuid(0)


def test_a_folder_that_vanishes_is_empty(tmp_path, monkeypatch):
    folder, listdir = tmp_path / "checkpoints", os.listdir
    folder.mkdir()
    put(folder / "a", 1)

    def removed_before(path: str | os.PathLike[str] = ".") -> list[str]:
        if Path(path) == folder:
            shutil.rmtree(folder, ignore_errors=True)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", removed_before)
    assert search(folder) == [] and newest_generation(folder) == 0


def test_files_that_others_remove_while_a_folder_is_removed(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    (folder / "b").mkdir(parents=True)
    for name in "xyz":
        (folder / "b" / name).touch()
    unlink, gone = os.unlink, []

    def also_by_others(path: object, **options: object) -> None:
        unlink(path, **options)
        if not gone:
            gone.append(path)
            for name in os.listdir(folder / "b"):
                unlink(folder / "b" / name)

    monkeypatch.setattr(os, "unlink", also_by_others)
    remove_tree(folder)
    assert names(tmp_path) == []


def test_only_one_of_two_drops_a_checkpoint(tmp_path, monkeypatch):
    put(tmp_path / "a", 1)
    rename = os.rename

    def by_another_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        drop(tmp_path / "a")
        rename(source, target)

    monkeypatch.setattr(os, "rename", by_another_first)
    drop(tmp_path / "a")
    assert names(tmp_path) == []


def test_what_a_killed_drop_leaves_is_no_checkpoint(tmp_path, monkeypatch):
    put(tmp_path / "a", 1)
    monkeypatch.setattr(checkpoint_files, "remove_tree", lambda path: None)
    drop(tmp_path / "a")
    monkeypatch.undo()
    assert search(tmp_path) == [] and len(names(tmp_path)) == 1
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_another_run_gives_a_folder_its_name_first(tmp_path):
    with partial_folder(tmp_path / "a", f"{1:032x}") as folder:
        manifest = fill(folder, 1)
        os.rename(folder, tmp_path / "a")
        commit(folder, tmp_path / "a", manifest.save_id)
    assert names(tmp_path) == ["a"] and Manifest.read(tmp_path / "a") == manifest


def test_a_rename_that_fails_leaves_the_older_checkpoint(tmp_path):
    older = put(tmp_path / "a", 1)
    with partial_folder(tmp_path / "a", f"{2:032x}") as folder:
        fill(folder, 2)
        shutil.rmtree(folder)
        with pytest.raises(FileNotFoundError):
            commit(folder, tmp_path / "a", f"{2:032x}")
    assert names(tmp_path) == ["a"] and Manifest.read(tmp_path / "a") == older


def test_a_leftover_that_another_run_names_first(tmp_path, monkeypatch):
    left = leave(tmp_path / "a", 3)

    def by_another_first(folder: Path, final: Path, save_id: str) -> None:
        os.rename(left, final)
        commit(folder, final, save_id)

    monkeypatch.setattr(checkpoint_files, "commit", by_another_first)
    recover(tmp_path / "a")
    assert names(tmp_path) == ["a"] and Manifest.read(tmp_path / "a").step == 3


def test_without_locks_a_folder_that_is_written_stays(tmp_path, monkeypatch):
    """As on some network file systems: another run may be writing it, which only the times of its files tell."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "no locks for folders")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    fresh, left = leave(tmp_path / "a", 1, complete=False), leave(tmp_path / "b", 2, complete=False)
    for path in (left / "data", left, lock_path(left)):
        os.utime(path, (OLD, OLD))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [lock_path(fresh).name, fresh.name]


def test_waiting_ends(tmp_path, monkeypatch):
    looks = iter([False, False, True])
    wait_until(lambda: next(looks), tmp_path, "it")
    monkeypatch.setattr(shared_folder, "LONGEST_DELAY_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match="it was written by another node, but is not to be seen here after"):
        wait_until(lambda: False, tmp_path / "nowhere", "it")


# Two nodes, one folder


def save(folder: Path, training: object, step: int, **options: Any) -> None:
    save_checkpoint(folder, training, layout(), plan_digest="p", step=step, samples_seen=step, seed=0, **options)


def save_while_a_token_vanishes(root: str) -> list[str]:
    """Node 1's token is there when node 0 lists the folder, and gone when node 0 looks at it."""
    root, listed = Path(root), Path(root).parent / "listed"
    stat, unlink = os.stat, Path.unlink

    def wait(until: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not until() and time.monotonic() < end:
            time.sleep(0.001)

    def looking(path: object, **options: object) -> os.stat_result:
        if str(path).endswith(".node1"):
            listed.touch()
            wait(lambda: os.listdir(root) == [])
        return stat(path, **options)

    def removing(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(".node1"):
            wait(listed.exists)
        unlink(path, missing_ok)

    training = objects(steps=1)
    if dist.get_rank() == 0:
        os.stat = looking
    else:
        Path.unlink = removing
    try:
        save(root / "a", training, 1)
    finally:
        os.stat, Path.unlink = stat, unlink
    assert listed.exists()
    return visible(root)


def test_a_token_that_vanishes_between_two_looks(workers, tmp_path):
    (tmp_path / "shared").mkdir()
    assert workers(2).run(save_while_a_token_vanishes, str(tmp_path / "shared"), nodes=(1, 1)) == [["a"]] * 2


def leave_a_note(folder: str) -> frozenset[int]:
    """A hook of ``save_state`` that writes into the checkpoint, on the main process as most of them."""
    if dist.get_rank() == 0:
        Path(folder, "note.txt").write_text("mine")
    return frozenset()


def save_while_tokens_are_invisible(root: str, hook: Callable[[str], frozenset[int]] | None) -> list[str]:
    """Each node sees its own token only, so that both take themselves for writers."""
    exists = Path.exists
    Path.exists = lambda path: exists(path) and not (path.name.endswith(".node0") and dist.get_rank() == 1)
    training = objects(steps=1)
    try:
        for step in (1, 2):
            save(Path(root) / "a", training, step, before_writing=hook)
            dist.barrier()
        found = objects(seed=1)
        loaded = load_checkpoint(Path(root) / "a", found, layout(), plan_digest="p")
    finally:
        Path.exists = exists
    assert loaded.step == 2 and (hook is None or (Path(root) / "a" / "note.txt").exists())
    assert_same(full_state(found), full_state(training))
    return visible(Path(root))


@pytest.mark.parametrize("hook", [None, leave_a_note])
def test_a_file_system_that_shows_tokens_late(workers, tmp_path, hook):
    assert workers(2).run(save_while_tokens_are_invisible, str(tmp_path), hook, nodes=(1, 1)) == [["a"]] * 2


def load_what_is_seen_late(root: str) -> tuple[int, list[str]]:
    """A killed writer left a complete folder; node 1 sees the name that node 0 gives it only after some looks."""
    final, read, looks = Path(root) / "a", Manifest.read.__func__, []

    def late(kind: type, folder: Path) -> Manifest:
        if dist.get_rank() == 1 and Path(folder) == final and len(looks) < 3:
            looks.append(folder)
            raise FileNotFoundError(errno.ENOENT, "not seen yet", str(folder))
        return read(kind, folder)

    training, found = objects(steps=1), objects(seed=1)
    save(final, training, 3)
    if dist.get_rank() == 0:
        os.rename(final, final.parent / f".a.{Manifest.read(final).save_id}.partial")
    dist.barrier()
    Manifest.read = classmethod(late)
    try:
        loaded = load_checkpoint(final, found, layout(), plan_digest="p")
    finally:
        Manifest.read = classmethod(read)
    assert_same(full_state(found), full_state(training))
    return loaded.step, visible(Path(root))


def test_a_name_that_another_node_gave_and_that_is_seen_late(workers, tmp_path):
    assert workers(2).run(load_what_is_seen_late, str(tmp_path), nodes=(1, 1)) == [(3, ["a"])] * 2


def count_from_a_stale_listing(root: str) -> list[int]:
    """Node 0, which writes, does not see yet what is there; node 1 does: the order of saves stays right."""
    training, counted = objects(), checkpoint_files.newest_generation
    save(Path(root) / "a", training, 1)
    checkpoint.newest_generation = lambda parent: 0 if dist.get_rank() == 0 else counted(parent)
    try:
        save(Path(root) / "b", training, 0)
    finally:
        checkpoint.newest_generation = counted
    dist.barrier()
    return [Manifest.read(Path(root) / name).generation for name in "ab"]


def test_a_node_that_sees_checkpoints_late_keeps_their_order(workers, tmp_path):
    assert workers(2).run(count_from_a_stale_listing, str(tmp_path), nodes=(1, 1)) == [[1, 2]] * 2
