# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The lock of a save in progress: other runs, also on other hosts, leave its hidden folder alone at any instant."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest
from test_checkpoint_files import fill, leave, names

from accelerate_lshdp.checkpoint import lock as checkpoint_lock
from accelerate_lshdp.checkpoint.folder import commit, in_use, partial_folder, remove_leftovers
from accelerate_lshdp.checkpoint.lock import lock_path


OLD = time.time() - 7200


@pytest.fixture
def other_host(monkeypatch):
    """As NFS does: locks on folders are known to their own host only, an exclusive one needs a file to write to."""
    flock = fcntl.flock

    def of_nfs(descriptor: int, kind: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        if kind & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "not open for writing")
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", of_nfs)


def test_another_host_leaves_a_save_alone(tmp_path, other_host):
    with partial_folder(tmp_path / "a", "1" * 32) as folder:
        remove_leftovers(tmp_path)
        assert in_use(folder)
        manifest = fill(folder, int("1" * 32, 16))
        remove_leftovers(tmp_path)
        assert in_use(folder)
        commit(folder, tmp_path / "a", manifest.save_id)
    assert names(tmp_path) == ["a"]


def test_a_folder_that_was_just_made_is_held_already(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def looked_at_by_another_run(path: Path, *args: int) -> None:
        mkdir(path, *args)
        remove_leftovers(tmp_path)

    monkeypatch.setattr(os, "mkdir", looked_at_by_another_run)
    with partial_folder(tmp_path / "a", "1" * 32) as folder:
        assert folder.is_dir() and in_use(folder)


def test_a_lock_that_another_run_takes_for_a_leftover(tmp_path, monkeypatch):
    """It looks between the making of the file and its lock, when there is no folder yet."""
    flock, looked = fcntl.flock, []

    def after_another_run(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_EX and not looked:
            looked.append(names(tmp_path))
            remove_leftovers(tmp_path)
            assert names(tmp_path) == []
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", after_another_run)
    with partial_folder(tmp_path / "a", "1" * 32) as folder:
        assert looked == [[lock_path(folder).name]] and in_use(folder)
        assert names(tmp_path) == [lock_path(folder).name, folder.name]
    assert names(tmp_path) == []


def test_a_writer_waits_for_whoever_looks_at_its_lock(tmp_path, monkeypatch):
    path, kinds, flock = lock_path(tmp_path / f".a.{'1' * 32}.partial"), [], fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, kind: kinds.append(kind) or flock(descriptor, kind))
    with checkpoint_lock.locked(path.with_suffix(".partial")):
        assert kinds == [fcntl.LOCK_EX], "a lock that is not waited for may be missing for the whole save"


def test_the_folder_has_one_maker(tmp_path):
    with partial_folder(tmp_path / "a", "1" * 32), pytest.raises(FileExistsError):
        with partial_folder(tmp_path / "a", "1" * 32):
            pass


def test_locks_of_killed_writers_are_removed(tmp_path):
    leave(tmp_path / "a", 1, complete=False)
    leave(tmp_path / "b", 2)  # gets its final name, and leaves its lock
    alone = tmp_path / f".c.{'3' * 32}.lock"
    alone.touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["b"]


def test_without_locks_the_age_tells(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    young, old = (tmp_path / f".{name}.{'3' * 32}.lock" for name in "ab")
    for path in (young, old):
        path.touch()
    os.utime(old, (OLD, OLD))
    with partial_folder(tmp_path / "c", "1" * 32) as folder:
        remove_leftovers(tmp_path)
        assert names(tmp_path) == sorted([young.name, folder.name, lock_path(folder).name])
