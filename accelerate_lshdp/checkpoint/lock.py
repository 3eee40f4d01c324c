# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Locks on hidden folders, which tell whether a writer lives: on a file beside the folder, released with its process.

On a file, because a network file system (NFS) tells other hosts of locks on files that are open for writing, and of
none on folders. Beside the folder, because it is locked before the folder is made: there never is a folder of a living
writer that looks abandoned.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate_lshdp.checkpoint.shared_folder import is_denied, is_gone, remove_file


_LOCK = re.compile(r"\..+\.[0-9a-f]{32}\.lock")


def lock_path(folder: Path) -> Path:
    """The file whose lock the writer of a hidden folder (``.name.identity.kind``) holds."""
    return folder.with_name(f"{folder.name.rpartition('.')[0]}.lock")


def is_lock(path: Path) -> bool:
    """Whether a file has the name of a lock."""
    return _LOCK.fullmatch(path.name) is not None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a hidden folder, which the caller makes inside the block.

    Raises:
        FileExistsError: another node, which shares the parent folder, holds it.
    """
    path = lock_path(folder)
    descriptor = _new_lock(path)
    try:
        yield
    finally:
        # The file is removed while it is locked: after the lock is given back, its name could be another writer's.
        try:
            remove_file(path)
        finally:
            os.close(descriptor)


def _new_lock(path: Path) -> int:
    while True:
        # Exclusive, so that of two nodes that want the same folder one gets an error; for writing, as NFS wants it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Waits: another run that looks whether this lock is left over holds it for an instant.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # this file system has no locks; only the age of files tells what is left over
            return descriptor
        if _names(path, descriptor):
            return descriptor
        os.close(descriptor)  # that run has found nobody to hold it, and removed it


def _names(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file, which was locked after it was made."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        if is_gone(error):
            return False
        raise


@contextmanager
def probed(path: Path) -> Iterator[bool | None]:
    """Tries a lock, or a folder that has none, and holds it until the end of the block if it is free.

    Yields:
        True: nobody holds it, and nobody can get it before the end of the block. False: a process holds it, or it is
        gone, or it belongs to another user and must not be touched. None: this file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)  # enough to share a lock, also on NFS
    except OSError as error:
        if not (is_gone(error) or is_denied(error)):
            raise
        descriptor = None
    try:
        yield descriptor is not None and _share(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _share(descriptor: int) -> bool | None:
    # Shared, so that several runs that look at the same time do not take each other for a writer; and without waiting
    # for one.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_free(folder: Path) -> bool | None:
    """Whether no living writer holds a hidden folder, as `probed` says it.

    A folder that was renamed from its final name has no lock: then its own tells whether there are locks at all.
    """
    lock = lock_path(folder)
    with probed(lock if os.path.lexists(lock) else folder) as free:
        return free


def remove_lock(path: Path, is_old: bool) -> None:
    """Removes a lock that a killed writer left, or whose folder another run has removed or given its final name.

    Args:
        path: of the lock.
        is_old: whether it is older than any that is held, where the file system has no locks.
    """
    with probed(path) as free:
        # Looked at again under the lock: a folder is made by who holds it.
        if (free or (free is None and is_old)) and not os.path.lexists(path.with_suffix(".partial")):
            remove_file(path)
