"""A checkpoint as a folder: its manifest, and how it comes to be complete under its final name or not at all.

A writer fills a hidden folder beside the final name, brings it to the disk, and renames it. The manifest is written
last, so a folder with a valid manifest is complete even if its writer was killed before the rename. The writer holds a
lock on its folder: a hidden folder that nobody holds is what a killed writer left.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate_lshdp.engine.checkpoint_stream import WrittenFile


FORMAT = "accelerate_lshdp checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
READ_BYTES = 1 << 24
#: A token of this age was left by a killed process.
LONGEST_ELECTION_SECONDS = 3600.0
_TOKEN = re.compile(r"\..+\.[0-9a-f]{32}\.node\d+")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<save_id>[0-9a-f]{32})\.(?P<kind>partial|replaced)")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        save_id: the same on all nodes, different for every save.
        generation: one more than that of any checkpoint that was in the parent folder of any node; the order of saves,
            which neither the clocks of the nodes nor a run that went back to an earlier step can confuse.
        step, samples_seen, seed, world_size, plan_digest: of the run when it saved.
        files: sizes and checksums. Nodes may differ in these, where their replicas do.
    """

    save_id: str
    generation: int
    step: int
    samples_seen: int
    seed: int
    world_size: int
    plan_digest: str
    files: dict[str, WrittenFile]

    @property
    def age(self) -> tuple[int, int, str]:
        """Sorts from the oldest to the newest."""
        return (self.generation, self.step, self.save_id)

    def to_json(self) -> str:
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        document["checksum"] = _checksum(document)
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads and checks the manifest alone.

        Raises:
            ValueError: if it is damaged or of another version.
            OSError: as the file system raises it.
        """
        path = folder / MANIFEST
        try:
            document = json.loads(path.read_bytes())
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r}")
            version = document["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the manifest of a checkpoint, or damaged: {error!r}") from error
        if version != VERSION:
            raise ValueError(
                f"{path} has version {version!r}, this release reads version {VERSION}; load it with the release that "
                "wrote it"
            )
        checksum = document.pop("checksum", None)
        if checksum != _checksum(document):
            raise ValueError(f"{path} is damaged: its checksum does not match")
        files = {name: WrittenFile(**written) for name, written in document.pop("files").items()}
        if any(os.path.basename(name) != name for name in files):  # it may come from another node
            raise ValueError(f"{path} lists files outside its folder: {sorted(files)}")
        return cls(**{key: value for key, value in document.items() if key not in ("format", "version")}, files=files)


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
    """`directory` if it is a checkpoint, or else the checkpoints in it; with what killed writers left complete."""
    found = []
    if (directory / MANIFEST).is_file():
        found.append(_look(directory, ""))
    for path, name in _abandoned(directory.parent):
        if name == directory.name and (path / MANIFEST).is_file():
            found.append(_look(path, ""))
    if found or not directory.is_dir():
        return found
    for path in sorted(directory.iterdir()):
        if not path.name.startswith(".") and (path / MANIFEST).is_file():
            found.append(_look(path, path.name))
    for path, name in _abandoned(directory):
        if (path / MANIFEST).is_file():
            found.append(_look(path, name))
    return found


def verify(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files of a checkpoint, or None; reads all of them."""
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
    """Writes a small file and brings it to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(len(data), zlib.crc32(data))


def check_replaceable(final: Path) -> None:
    """Raises FileExistsError if a save to `final` would replace something that is no checkpoint."""
    if final.is_dir():
        if any(final.iterdir()) and not (final / MANIFEST).is_file():
            raise FileExistsError(
                f"{final} exists, is not empty and is not a checkpoint; a checkpoint replaces the whole folder, "
                "so give it a name of its own"
            )
    elif os.path.lexists(final):
        raise FileExistsError(f"{final} exists and is not a folder")


@contextmanager
def partial_folder(final: Path, save_id: str) -> Iterator[Path]:
    """A new hidden folder beside `final`, locked; what is left of it at the end is removed."""
    path = _hidden_path(final, save_id, "partial")
    if path.exists():  # this very save, left by a killed transfer
        shutil.rmtree(path)
    path.mkdir(parents=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        if path.exists():
            shutil.rmtree(path)


def guest_folder(final: Path, save_id: str) -> Path:
    """Where others may put what is to be beside our files: inside the hidden folder, under the final name."""
    return _hidden_path(final, save_id, "partial") / final.name


def take_in(guest: Path, own: Collection[str]) -> None:
    """Moves what others put into a guest folder beside our own files, before these are written.

    Raises:
        FileExistsError: one of them has the name of an own file.
    """
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


def commit(folder: Path, final: Path, save_id: str) -> None:
    """Renames a complete hidden folder to its final name, in place of an older checkpoint if there is one.

    Killed between the two renames, it leaves no final name but two complete hidden folders, which `search` and
    `recover` know. Files that others put into the older checkpoint move to the new one.
    """
    _sync_folder(folder)
    replaced = None
    if final.is_dir():
        replaced = _hidden_path(final, save_id, "replaced")
        os.rename(final, replaced)
    os.rename(folder, final)
    _sync_folder(final.parent)
    if replaced is not None:
        _keep_foreign_files(replaced, final)
        shutil.rmtree(replaced)


def recover(final: Path) -> None:
    """Gives `final` its name: the newest complete folder that a killed writer left, if `final` is older or missing."""
    left = [_look(path, "") for path, name in _abandoned(final.parent) if name == final.name]
    usable = [found for found in left if found.manifest and verify(found.path, found.manifest) is None]
    if not usable:
        return
    newest = max(usable, key=lambda found: found.manifest.age)
    current = _look(final, "").manifest
    if current is None or current.age < newest.manifest.age:
        commit(newest.path, final, newest.manifest.save_id)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed writers left in `parent`; completes what only lacked its rename."""
    for name in {name for _, name in _abandoned(parent)}:
        recover(parent / name)
    for path, _ in _abandoned(parent):
        shutil.rmtree(path)
    for path in parent.iterdir():
        if _TOKEN.fullmatch(path.name) and path.stat().st_mtime < time.time() - LONGEST_ELECTION_SECONDS:
            path.unlink()


def is_hidden(path: Path) -> bool:
    """Whether a folder has one of this module's hidden names."""
    return _HIDDEN.fullmatch(path.name) is not None


def token_path(final: Path, token: str, node: int) -> Path:
    """An empty file by which nodes find out whether they share a folder; it lives for an instant."""
    return final.parent / f".{final.name}.{token}.node{node}"


def newest_generation(parent: Path) -> int:
    """The largest generation of any checkpoint in `parent`; 0 if there is none."""
    if not parent.is_dir():
        return 0
    manifests = (_look(path, "").manifest for path in parent.iterdir() if (path / MANIFEST).is_file())
    return max((manifest.generation for manifest in manifests if manifest is not None), default=0)


def in_use(folder: Path) -> bool:
    """Whether a living writer holds a hidden folder. Where folders cannot be locked (NFS) nothing is ever in use."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # committed or removed since it was listed
        return True
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks for folders
        return True
    return True


def _look(path: Path, relative: str) -> Found:
    try:
        return Found(path, relative, Manifest.read(path), None)
    except (OSError, ValueError) as error:
        return Found(path, relative, None, str(error))


def _hidden(parent: Path) -> list[tuple[Path, str]]:
    """Hidden folders of this module in `parent`, each with the final name that it was meant for."""
    if not parent.is_dir():
        return []
    matches = [(path, _HIDDEN.fullmatch(path.name)) for path in sorted(parent.iterdir())]
    return [(path, match["name"]) for path, match in matches if match]


def _abandoned(parent: Path) -> list[tuple[Path, str]]:
    """Hidden folders of names that no living writer is about to replace."""
    hidden = _hidden(parent)
    busy = {name for path, name in hidden if in_use(path)}
    return [(path, name) for path, name in hidden if name not in busy]


def _hidden_path(final: Path, save_id: str, kind: str) -> Path:
    return final.parent / f".{final.name}.{save_id}.{kind}"


def _keep_foreign_files(replaced: Path, final: Path) -> None:
    found = _look(replaced, "")
    if found.manifest is None:  # nothing says which files are ours
        return
    for path in replaced.iterdir():
        if path.name != MANIFEST and path.name not in found.manifest.files and not (final / path.name).exists():
            os.rename(path, final / path.name)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(document: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in document.items() if key != "checksum"}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"
