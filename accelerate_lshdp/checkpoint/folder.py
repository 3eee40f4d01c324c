# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A checkpoint as a folder that is complete under its final name, or not there at all.

A writer fills a hidden folder beside the final name, brings it to the disk, and renames it. The manifest is written
last, so a folder with a valid manifest is complete even if its writer was killed before the rename. The writer holds a
lock (`lock`): a hidden folder that nobody holds is what a killed writer left.
"""

from __future__ import annotations

import os
import re
import time
import uuid
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate_lshdp.checkpoint.lock import is_free, is_lock, lock_path, locked, remove_lock
from accelerate_lshdp.checkpoint.manifest import MANIFEST, Manifest
from accelerate_lshdp.checkpoint.shared_folder import (
    changed_at,
    entries,
    holds_file,
    is_denied,
    is_gone,
    may_hold,
    remove_file,
    remove_tree,
)
from accelerate_lshdp.checkpoint.stream import WrittenFile


#: Bytes read at once for a checksum.
READ_BYTES = 1 << 24
#: A token of this age was left by a killed process; so was a hidden folder, where the file system has no locks.
LONGEST_ELECTION_SECONDS = 3600.0
_TOKEN = re.compile(r"\..+\.[0-9a-f]{32}\.node\d+")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<save_id>[0-9a-f]{32})\.(?P<kind>partial|replaced)")


@dataclass(frozen=True)
class Found:
    """A folder that looks like a checkpoint.

    Attributes:
        path: where it is now.
        relative: its final name relative to the folder that was searched; "" for that folder itself.
        manifest: None if it cannot be read.
        problem: why it cannot be used, as far as reading the manifest tells.
    """

    path: Path
    relative: str
    manifest: Manifest | None
    problem: str | None


def search(directory: Path) -> list[Found]:
    """Searches for checkpoints: `directory` if it is one, or else those in it; with what killed writers left complete.

    Folders in it that this user may not look into are found as well, with that as their problem.

    Raises:
        PermissionError: this user may not look into `directory` itself.
    """
    found = []
    # Under the final name first: a caller that finds one save twice takes the first of the two.
    if holds_file(directory / MANIFEST):
        found.append(_inspect(directory, ""))
    for path, name in _abandoned(directory.parent):
        if name == directory.name and may_hold(path, MANIFEST):
            found.append(_inspect(path, ""))
    if found:
        return found
    for path in entries(directory):
        # Hidden folders come below, those of living writers excepted.
        if path.name.startswith("."):
            continue
        holds = may_hold(path, MANIFEST)
        if holds is None:
            found.append(Found(path, path.name, None, f"{path} belongs to another user, who lets nobody look into it"))
        elif holds:
            found.append(_inspect(path, path.name))
    for path, name in _abandoned(directory):
        if may_hold(path, MANIFEST):
            found.append(_inspect(path, name))
    return found


def verify(folder: Path, manifest: Manifest) -> str | None:
    """Reads all files of a checkpoint and returns the first thing that is wrong with them, or None."""
    # Sizes first: they find a truncated file without reading it.
    for name, written in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
            if size != written.bytes:
                return f"{folder / name} has {size} bytes, its manifest says {written.bytes}"
            if checksum_of(folder / name) != written.crc32:
                return f"{folder / name} is damaged: its checksum does not match the manifest"
        except OSError as error:
            return f"{folder / name} cannot be read: {error}"
    return None


def checksum_of(path: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def write_file(path: Path, data: bytes) -> WrittenFile:
    """Writes a small new file and brings it to the disk; returns its size and CRC-32."""
    # "x": a file of that name would be of another writer of this folder. Flushed from Python's buffer before fsync,
    # which knows the kernel's pages only.
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(len(data), zlib.crc32(data))


def check_replaceable(final: Path) -> None:
    """Raises FileExistsError if a save to `final` would replace something that is no checkpoint."""
    if changed_at(final) is None:
        return
    if final.is_dir():
        if entries(final) and not holds_file(final / MANIFEST):
            raise FileExistsError(
                f"{final} exists, is not empty and is not a checkpoint; a checkpoint replaces the whole folder, "
                "so give it a name of its own"
            )
    elif os.path.lexists(final):
        raise FileExistsError(f"{final} exists and is not a folder")


@contextmanager
def partial_folder(final: Path, save_id: str) -> Iterator[Path]:
    """A new hidden folder beside `final`, locked; what is left of it at the end is removed.

    Raises:
        FileExistsError: another node, which shares the parent folder, has just made it: the file system decides who
            writes where tokens of other nodes are seen too late.
    """
    path = _hidden_path(final, save_id, "partial")
    # Locked before it exists and until it is gone or renamed: a hidden folder whose lock is free is of a dead writer.
    with locked(path):
        os.mkdir(path)
        try:
            yield path
        finally:
            remove_tree(path)


def hook_folder(final: Path, save_id: str, rank: int | None = None) -> Path:
    """The folder for files that hooks of ``save_state`` write: inside the hidden folder, under the final name.

    Args:
        final: of the checkpoint.
        save_id: of the save.
        rank: whose own it is, which has no states of models; None: the folder of the ranks that have them.
    """
    partial = _hidden_path(final, save_id, "partial")
    # Hooks see the path that the script has given save_state as the last part, and may make names of it.
    return (partial if rank is None else partial / f"{final.name}.{rank}") / final.name


def move_hook_files(guest: Path, own: Collection[str]) -> None:
    """Moves the files that hooks have written beside the checkpoint's own, before these are written.

    Of files of one name, those of the ranks that have the states of the models are kept.

    Args:
        guest: from `hook_folder`, that of the ranks with states.
        own: names of the checkpoint's own files.

    Raises:
        FileExistsError: one of them has the name of an own file.
    """
    for apart in entries(guest.parent):
        if apart != guest:  # nothing else is in the hidden folder yet
            _add_missing(apart / guest.name, guest)
            remove_tree(apart)
    taken = sorted(path.name for path in guest.iterdir() if path.name in own)
    if taken:
        raise FileExistsError(
            f"a hook of save_state wrote {', '.join(taken)}, a name of the checkpoint's own; give it another name"
        )
    # Under a name that no file can have: one of the guests may be called like the folder.
    emptied = guest.rename(guest.with_name(f"{guest.name}.{uuid.uuid4().hex}"))
    for path in list(emptied.iterdir()):
        path.rename(emptied.parent / path.name)
    emptied.rmdir()


def _add_missing(source: Path, target: Path) -> None:
    """Moves what is in one folder and not in the other, also of the folders in them."""
    for path in list(source.iterdir()):
        goal = target / path.name
        if not os.path.lexists(goal):
            path.rename(goal)
        elif path.is_dir() and goal.is_dir() and not goal.is_symlink():
            _add_missing(path, goal)


def commit(folder: Path, final: Path, save_id: str) -> None:
    """Renames a complete hidden folder to its final name, in place of an older checkpoint if there is one.

    Killed between the two renames, it leaves no final name but two complete hidden folders, which `search` and
    `recover` know. Files that others put into the older checkpoint move to the new one. If another node or run has
    given this folder its name in the meantime, as `recover` does, nothing is left to be done.
    """
    _rename(folder, final, save_id)

    with _unless_denied():
        remove_lock(lock_path(folder), is_old=False)  # of a killed writer; a living one holds it until the end


def _rename(folder: Path, final: Path, save_id: str) -> None:
    replaced: Path | None = _hidden_path(final, uuid.uuid4().hex, "replaced")
    try:
        # The names of the files reach the disk before the folder gets its final name: after a power failure there must
        # be no final name with half of the files. The files themselves were synchronised as they were written.
        _sync_folder(folder)
        # Renamed without a look at what is there: another node may have made or moved it since, or be seen to late.
        try:
            os.rename(final, replaced)
        except OSError as error:
            if not is_gone(error):
                raise
            replaced = None
        try:
            os.rename(folder, final)
        except OSError:
            # The older checkpoint gets its name back: a save that fails leaves what was there.
            if replaced is not None:
                os.rename(replaced, final)
            raise
    except OSError as error:
        if is_gone(error) and is_named(final, save_id):
            return
        raise
    # The rename itself reaches the disk before the older checkpoint is removed: one of them is always there.
    _sync_folder(final.parent)
    if replaced is not None:
        _keep_foreign_files(replaced, final)
        remove_tree(replaced)


def drop(final: Path) -> None:
    """Removes a checkpoint as a whole: it is out of sight at once; other nodes may drop it at the same time."""
    # One rename first: a reader never sees a folder with some of its files gone, and of several that drop it at the
    # same time one succeeds.
    hidden = _hidden_path(final, uuid.uuid4().hex, "replaced")
    try:
        os.rename(final, hidden)
    except OSError as error:
        if is_gone(error):
            return
        raise
    remove_file(hidden / MANIFEST)  # first, so that nobody takes what a killed process leaves for a checkpoint
    remove_tree(hidden)


def recover(final: Path) -> None:
    """Gives `final` its name: the newest complete folder that a killed writer left, if `final` is older or missing."""
    # Verified in full: only a folder whose files are all whole may take the place of an older checkpoint.
    left = [_inspect(path, "") for path, name in _abandoned(final.parent) if name == final.name]
    usable = [found for found in left if found.manifest and verify(found.path, found.manifest) is None]
    if not usable:
        return
    # By what saves say of their order: times of files change when they are copied, and clocks of nodes differ.
    newest = max(usable, key=lambda found: found.manifest.age)
    current = _inspect(final, "").manifest
    if current is None or current.age < newest.manifest.age:
        commit(newest.path, final, newest.manifest.save_id)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed writers left in `parent`; completes what only lacked its rename.

    What other users left there, and this one may not remove, stays: it is in nobody's way.
    """
    # Complete ones get their name before anything is removed: a writer may have been killed between its two renames.
    for name in {name for _, name in _abandoned(parent)}:
        with _unless_denied():
            recover(parent / name)
    for path, _ in _abandoned(parent):
        with _unless_denied():
            # Asked again for each: time has passed since the list was made, as `recover` reads whole checkpoints.
            # None: nothing but its age tells whether a living writer has it.
            free = is_free(path)
            if free or (free is None and _is_old(path)):
                remove_tree(path)
    for path in entries(parent):
        with _unless_denied():
            if is_lock(path):
                remove_lock(path, _is_old(path))
            elif _TOKEN.fullmatch(path.name) and _is_old(path):
                remove_file(path)


def is_named(final: Path, save_id: str) -> bool:
    """Whether the checkpoint under a final name is of this save."""
    found = _inspect(final, "").manifest
    return found is not None and found.save_id == save_id


def is_hidden(path: Path) -> bool:
    """Whether a folder has one of this module's hidden names."""
    return _HIDDEN.fullmatch(path.name) is not None


def token_path(final: Path, token: str, node: int) -> Path:
    """The path of a short-lived empty file by which nodes find out whether they share a folder."""
    return final.parent / f".{final.name}.{token}.node{node}"


def hidden_names(parent: Path) -> list[str]:
    """The final names of all hidden folders in `parent`."""
    return [name for _, name in _hidden(parent)]


def newest_generation(parent: Path) -> int:
    """The largest generation of any checkpoint in `parent` that this user may read; 0 if there is none."""
    manifests = (_inspect(path, "").manifest for path in entries(parent) if may_hold(path, MANIFEST))
    return max((manifest.generation for manifest in manifests if manifest is not None), default=0)


def in_use(folder: Path) -> bool:
    """Whether a living writer holds a hidden folder. Where files cannot be locked nothing is ever in use."""
    return is_free(folder) is False


@contextmanager
def _unless_denied() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_denied(error):
            raise


def _is_old(path: Path) -> bool:
    """Whether nothing at a path has changed for `LONGEST_ELECTION_SECONDS`; a save never pauses for so long."""
    # The files in it, too: a folder's own time changes with its names only, not while a large file is written.
    times = [changed_at(part) for part in (path, *entries(path))]
    return all(changed is not None and changed < time.time() - LONGEST_ELECTION_SECONDS for changed in times)


def _inspect(path: Path, relative: str) -> Found:
    try:
        return Found(path, relative, Manifest.read(path), None)
    except (OSError, ValueError) as error:
        return Found(path, relative, None, str(error))


def _hidden(parent: Path) -> list[tuple[Path, str]]:
    """Hidden folders of this module in `parent`, each with the final name that it was meant for."""
    matches = [(path, _HIDDEN.fullmatch(path.name)) for path in entries(parent)]
    return [(path, match["name"]) for path, match in matches if match]


def _abandoned(parent: Path) -> list[tuple[Path, str]]:
    """Hidden folders of names that no living writer is about to replace."""
    # By names, not by folders: while a writer lives, the older checkpoint that it has just renamed is hidden, too.
    hidden = _hidden(parent)
    busy = {name for path, name in hidden if in_use(path)}
    return [(path, name) for path, name in hidden if name not in busy]


def _hidden_path(final: Path, save_id: str, kind: str) -> Path:
    return final.parent / f".{final.name}.{save_id}.{kind}"


def _keep_foreign_files(replaced: Path, final: Path) -> None:
    """Moves files that users put into a replaced checkpoint (a README, say) into the new one."""
    found = _inspect(replaced, "")
    if found.manifest is None:  # nothing says which files are ours
        return
    for path in entries(replaced):
        if path.name != MANIFEST and path.name not in found.manifest.files and not (final / path.name).exists():
            try:
                os.rename(path, final / path.name)
            except OSError as error:
                if not is_gone(error):
                    raise


def _sync_folder(path: Path) -> None:
    # What fsync of a file does not do: the entries of its folder are data of the folder (fsync(2)).
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
