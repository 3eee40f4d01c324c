# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The manifest of a checkpoint: its identity, files and checksums, written last and read first."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate_lshdp.checkpoint.stream import WrittenFile


FORMAT = "accelerate_lshdp checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Manifest:
    """The identity of a checkpoint, the state of its run, and its files with sizes and checksums.

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
        """A key that sorts checkpoints from the oldest to the newest."""
        # Generations are equal if runs have saved on nodes that did not know of each other's checkpoints. The identity
        # makes the order total, and the same on all nodes.
        return (self.generation, self.step, self.save_id)

    def to_json(self) -> str:
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        # Of the manifest itself, which no other file vouches for.
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
                raise ValueError(f"format {document['format']!r:.60}")
            # The version before the checksum: how a later release computes that is not known here.
            version = document["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not the manifest of a checkpoint, or damaged: {error!r}") from error
        if version != VERSION:
            raise ValueError(
                f"{path} has version {version!r:.60}, this release reads version {VERSION}; load it with the release "
                "that wrote it"
            )
        # Taken out first: the checksum is of all other values.
        checksum = document.pop("checksum", None)
        if checksum != _checksum(document):
            raise ValueError(f"{path} is damaged: its checksum does not match")
        values = {key: value for key, value in document.items() if key not in ("format", "version")}
        try:
            return cls._from_values(values)
        except ValueError as error:
            raise ValueError(f"{path} {error}") from error

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Manifest:
        """Raises ValueError at what no save writes, as the checksum may be right nevertheless."""
        checks: dict[str, tuple[str, Callable[[Any], bool]]] = {
            "save_id": ("32 hexadecimal digits", lambda value: isinstance(value, str) and bool(_ID.fullmatch(value))),
            **dict.fromkeys(("generation", "step", "samples_seen"), ("a whole number of at least 0", _is_count)),
            "seed": ("a whole number", lambda value: type(value) is int),
            "world_size": ("a whole number of at least 1", lambda value: _is_count(value) and value > 0),
            "plan_digest": ("a string", lambda value: isinstance(value, str)),
            "files": ("sizes and checksums by name", _are_files),
        }
        if set(values) != set(checks):
            found = ", ".join(sorted(str(key)[:40] for key in values)[:20])
            raise ValueError(f"found the keys {found}, expected save_id and {', '.join(list(checks)[1:])}")
        for name, (expected, holds) in checks.items():
            if not holds(values[name]):
                raise ValueError(f"{name}: found {values[name]!r:.80}, expected {expected}")
        files = {name: WrittenFile(**written) for name, written in values.pop("files").items()}
        # A manifest from elsewhere must not make a load read, or a transfer write, outside of the checkpoint's folder.
        if any(os.path.basename(name) != name or name in ("", ".", "..") for name in files):  # of another node
            raise ValueError(f"lists files outside its folder: {sorted(files)!s:.200}")
        return cls(**values, files=files)


def _is_count(value: object) -> bool:
    # By type, as True is an int, too.
    return type(value) is int and 0 <= value < 2**63


def _are_files(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(written, dict) and set(written) == {"bytes", "crc32"} and all(map(_is_count, written.values()))
        for written in value.values()
    )


def _checksum(document: dict[str, Any]) -> str:
    # Sorted keys: the text is the same, whatever order a reader's dictionary has.
    text = json.dumps({key: value for key, value in document.items() if key != "checksum"}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"
