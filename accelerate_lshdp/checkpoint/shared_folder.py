# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""File operations in a folder that other nodes and runs change at the same time: what was listed may be gone.

A network file system also shows late what another node did, and says of what another node removed that its handle is
stale. A folder such as /tmp holds things of other users, which this one may neither read nor remove. None of this is
an error of the run that looks.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path


#: A file system that caches what folders hold shows changes of other nodes after seconds (NFS: up to a minute).
LONGEST_DELAY_SECONDS = 180.0
# ESTALE: the handle of a file on NFS that another node has removed. ENOTDIR: a file took the place of a folder.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_DENIED = (errno.EACCES, errno.EPERM)
# Every attempt that fails has found that others removed something, so many attempts mean a file system without sense.
_ATTEMPTS = 100
_logger = logging.getLogger(__name__)


def is_gone(error: OSError) -> bool:
    """Whether an error says that a file is not, or no longer, there."""
    return error.errno in _GONE


def is_denied(error: OSError) -> bool:
    """Whether an error says that this user has no permission, as for files of another user."""
    return error.errno in _DENIED


def entries(folder: Path) -> list[Path]:
    """The paths in a folder, sorted; none if the folder does not, or no longer, exist."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError as error:
        if is_gone(error):
            return []
        raise


def holds_file(path: Path) -> bool:
    """Whether there is a regular file at a path now."""
    # `is_file` passes on an ESTALE, which is no file either.
    try:
        return path.is_file()
    except OSError as error:
        if is_gone(error):
            return False
        raise


def may_hold(folder: Path, name: str) -> bool | None:
    """Whether there is a regular file of that name in one of many folders; None if this user may not look into it."""
    try:
        return holds_file(folder / name)
    except OSError as error:
        if is_denied(error):
            return None
        raise


def changed_at(path: Path) -> float | None:
    """The time of a file's last change in seconds since the epoch; None if the file is gone."""
    # Of a link itself: one that leads nowhere is still in the way.
    try:
        return path.lstat().st_mtime
    except OSError as error:
        if is_gone(error):
            return None
        raise


def remove_file(path: Path) -> None:
    """Removes a file; it is no error if another process has removed it."""
    try:
        path.unlink()
    except OSError as error:
        if not is_gone(error):
            raise


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it, while others may be doing the same.

    Raises:
        OSError: what is there cannot be removed.
    """
    for _ in range(_ATTEMPTS):
        if not os.path.lexists(path):
            return
        try:
            # Not with ignore_errors: it would leave what another process adds or removes meanwhile, without a word.
            shutil.rmtree(path)
            return
        except OSError as error:
            # Not empty: files that another process has open stay under hidden names on NFS until it closes them.
            if not is_gone(error) and error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                raise
            time.sleep(0.01)
    _logger.warning(f"{path} is still used by another process and stays; the next save removes it")


def wait_until(seen: Callable[[], bool], folder: Path, what: str) -> None:
    """Waits until this node sees what another node has done in a folder that they share.

    Args:
        seen: tells whether it is there now; it treats files that are gone, or not yet there, as no.
        folder: opened again between two looks, which makes NFS ask its server (close-to-open consistency).
        what: names what is waited for, in messages.

    Raises:
        TimeoutError: it was not seen in `LONGEST_DELAY_SECONDS`.
    """
    deadline, pause = time.monotonic() + LONGEST_DELAY_SECONDS, 0.01
    while not seen():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{what} was written by another node, but is not to be seen here after {LONGEST_DELAY_SECONDS:.0f} s. "
                "Give each node a folder of its own, or use a file system that shows its nodes the same"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
        try:
            os.close(os.open(folder, os.O_RDONLY))
        except OSError as error:
            if not is_gone(error):
                raise
