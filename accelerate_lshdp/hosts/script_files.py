# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The files of Python code that have to be the same on all machines of a run, and how they get there."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accelerate_lshdp.hosts.connection import HostConnection
from accelerate_lshdp.hosts.machine_facts import MachineFacts, read_digest


#: More files of code than this do not belong to one script.
MOST_FILES = 2000
# Folders with code of others: caches, and environments beside those that say so themselves by pyvenv.cfg.
_OTHERS = {"__pycache__", "node_modules", "site-packages"}
_COPY_SECONDS = 60.0


def code_beside(script: str | None) -> list[str]:
    """The Python files of a script's folder and those below it, as paths from the current folder.

    Args:
        script: path of the script; None: a module, whose code may be anywhere in the current folder.

    Raises:
        ValueError: the script is not in the current folder, so that its place on other machines is not known, or
            there are more files than one script has.
    """
    here = Path.cwd()
    folder = here if script is None else (here / from_here(script)).parent
    found = [str(path.relative_to(here)) for path in _code_in(folder)]
    if len(found) > MOST_FILES:
        raise ValueError(
            f"found more than {MOST_FILES} Python files in {folder}, expected a script's own. Move the script into a"
            " folder of its own"
        )
    return sorted(found)


def from_here(path: str | os.PathLike[str]) -> str:
    """A file's path from the current folder.

    Raises:
        ValueError: it is not in it, so that its place on other machines is not known.
    """
    here, whole = Path.cwd(), Path(os.path.abspath(path))
    if not whole.is_relative_to(here):
        raise ValueError(
            f"found {os.fspath(path)!r} outside of the current folder, expected a path inside of it: the folders of"
            " the machines stand for this one. Change to a folder that holds it"
        )
    return str(whole.relative_to(here))


def copy_to_all(
    files: Sequence[str], facts: Mapping[int, MachineFacts], connections: Mapping[int, HostConnection]
) -> dict[int, dict[str, str]]:
    """Copies files of the current folder to the machines where they are missing or others.

    Args:
        files: paths from the current folder.
        facts: of the machines, with the digests of these files there.
        connections: to the machines.

    Returns:
        By machine, the files that were copied, with their SHA-256.

    Raises:
        HostError: a machine could not write one.
    """
    own = {file: read_digest(Path(file)) for file in files}
    copied: dict[int, dict[str, str]] = {}
    for node, there in facts.items():
        for file in files:
            if there.files[file] != own[file]:
                content = base64.b64encode(Path(file).read_bytes()).decode()
                digest = connections[node].ask("write", _COPY_SECONDS, file=file, content=content)
                copied.setdefault(node, {})[file] = digest
    return copied


def _code_in(folder: Path) -> Iterator[Path]:
    count = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in _OTHERS and not Path(place, name, "pyvenv.cfg").exists()
        ]
        for name in files:
            # Editors leave hidden ones behind, some of which are links to nowhere.
            if name.endswith(".py") and not name.startswith(".") and Path(place, name).is_file():
                count += 1
                yield Path(place, name)
        if count > MOST_FILES:
            return
