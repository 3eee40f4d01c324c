# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Finds the newest checkpoint that is complete on some node, and brings it to all nodes."""

from __future__ import annotations

import os
import uuid
import warnings
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from accelerate_lshdp.checkpoint.folder import (
    MANIFEST,
    Found,
    Manifest,
    check_replaceable,
    commit,
    is_hidden,
    is_named,
    partial_folder,
    search,
    token_path,
    verify,
    write_file,
)
from accelerate_lshdp.checkpoint.shared_folder import remove_file, wait_until
from accelerate_lshdp.checkpoint.stream import WrittenFile
from accelerate_lshdp.checkpoint.validation import TRAINING, DocumentCheck, find_content_error
from accelerate_lshdp.runtime.object_exchange import (
    Attempt,
    NodeLayout,
    all_objects,
    broadcast_bytes,
    errors_on_all_ranks,
    object_from,
    raise_failure_on_all_ranks,
)


#: Bytes of one broadcast while a checkpoint is sent to other nodes.
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Newest:
    """The checkpoint that all ranks agreed on.

    Attributes:
        save_id: of the checkpoint.
        source: the rank that reads it for the nodes that lack it.
        relative: its name below the directory that was searched; "" for that directory.
        paths: where each node has it now, None where it does not.
    """

    save_id: str
    source: int
    relative: str
    paths: tuple[str | None, ...]

    def final_path(self, directory: Path, layout: NodeLayout) -> Path:
        """The path at which this node has or will have the checkpoint under its final name."""
        path = self.paths[layout.node]
        if path is not None and not is_hidden(Path(path)):
            return Path(path)
        return directory / self.relative if self.relative else directory


def elect_writer(final: Path, layout: NodeLayout) -> bool:
    """Decides whether this rank writes `final` (collective).

    One rank a node is, unless nodes share the parent folder: every candidate leaves a token there, and one that sees
    the token of an earlier node gives way. The parent folder is made.

    Raises:
        RuntimeError: on all ranks, if a parent folder cannot be written.
    """
    # New each time, so that a token that a killed process has left says nothing.
    token = object_from(0, uuid.uuid4().hex)
    tokens = [token_path(final, token, node) for node in range(layout.num_nodes)]
    left = False
    try:
        with errors_on_all_ranks(f"writing to {final.parent}"):
            if layout.is_writer:
                final.parent.mkdir(parents=True, exist_ok=True)
                tokens[layout.node].touch(exist_ok=False)
                left = True
        # The first block ends with a barrier: all tokens are there when anybody looks.
        with errors_on_all_ranks(f"reading {final.parent}"):
            elected = layout.is_writer and not any(path.exists() for path in tokens[: layout.node])
    finally:
        if left:  # everyone has looked by now, or has failed
            remove_file(tokens[layout.node])
    return elected


def enter_partial_folder(stack: ExitStack, final: Path, identity: str) -> Path | None:
    """The hidden folder for `final` while `stack` is open; None if another node that shares the parent has it.

    Two nodes of one shared parent are elected where the file system shows tokens late; the folder has one maker.
    """
    try:
        return stack.enter_context(partial_folder(final, identity))
    except FileExistsError:
        return None


def find_newest(
    directory: Path, layout: NodeLayout, check_document: DocumentCheck | None = None, *, takes_any: bool = False
) -> tuple[Newest | None, list[str]]:
    """Finds the newest checkpoint at or in `directory` that is complete on some node, and what is wrong with others.

    Collective. Newest is by order of saving. Checksums and contents of its files are verified on every node that has
    it; a node whose copy is damaged counts as lacking it, and all do if their documents differ. `check_document`
    checks loaders and extra values, which belong to the caller. With `takes_any` documents may differ: nodes that do
    not have that of the first holder count as lacking it.
    """
    found: list[Found] = []
    with errors_on_all_ranks(f"searching for checkpoints in {directory}"):
        if layout.is_writer:
            found = search(directory)
    # Reversed, so that of several copies of one save the first one found stays: that with the final name.
    mine = {item.manifest.save_id: item for item in reversed(found) if item.manifest is not None}
    unreadable = [item.problem for item in found if item.problem is not None]
    findings = all_objects(([item.manifest.age for item in mine.values()], unreadable))
    problems = [f"node of rank {rank}: {text}" for rank, (_, texts) in enumerate(findings) for text in texts]
    # All ranks go through the same list, from the newest on, and stop at the same place: each round is a collective.
    for age in sorted({tuple(age) for ages, _ in findings for age in ages}, reverse=True):
        save_id = age[-1]
        candidate = mine.get(save_id)
        problem = None
        # One checkpoint at a time, since reading all files of all of them takes long, and the newest is mostly whole.
        if candidate is not None:
            problem = verify(candidate.path, candidate.manifest)
            problem = problem or find_content_error(candidate.path, candidate.manifest, check_document)
        path = str(candidate.path) if candidate and problem is None else None
        document_crc32 = candidate.manifest.files[TRAINING].crc32 if path else None
        answers = all_objects((layout.node, path, candidate.relative if candidate else "", problem, document_crc32))
        problems += [f"node {answer[0]}: {answer[3]}" for answer in answers if answer[3] is not None]
        holders = [rank for rank, answer in enumerate(answers) if answer[1] is not None]
        if takes_any:
            holders = [rank for rank in holders if answers[rank][4] == answers[holders[0]][4]]
        if len({answers[rank][4] for rank in holders}) > 1:
            # Nodes would go on from different places, and which of them is right cannot be told.
            problems.append(
                f"{answers[holders[0]][1]}: nodes have different contents of its {TRAINING}, expected the same; if "
                "you know which node's is right, remove the checkpoint on the others, which get it from there"
            )
        elif holders:
            paths: list[str | None] = [None] * layout.num_nodes
            for rank in holders:
                paths[answers[rank][0]] = answers[rank][1]
            return Newest(save_id, holders[0], answers[holders[0]][2], tuple(paths)), problems
    return None, problems


def bring_to_all_nodes(newest: Newest, directory: Path, layout: NodeLayout) -> Path:
    """Sends a checkpoint to the nodes that lack it and gives it its final name everywhere (collective).

    Returns:
        Where this node has it.

    Raises:
        RuntimeError: on all ranks, if a node cannot read or write it.
    """
    final = newest.final_path(directory, layout)
    here = newest.paths[layout.node]
    in_place = all(all_objects(here is not None and Path(here) == final))
    if not in_place:
        _name_or_send(newest, final, here, layout)
    # A node that shares its folder with the one that wrote may see the new name late.
    with errors_on_all_ranks(f"reading checkpoint {final}"):
        wait_until(lambda: is_named(final, newest.save_id), final.parent, f"checkpoint {final}")
    return final


def _name_or_send(newest: Newest, final: Path, here: str | None, layout: NodeLayout) -> None:
    """Gives a checkpoint its final name on nodes that have it, and sends it to the others (collective)."""
    # One writer a folder: where nodes share it, one of them renames or receives for all.
    elected = elect_writer(final, layout)
    with errors_on_all_ranks("renaming a checkpoint that a killed writer had completed"):
        if elected and here is not None and Path(here) != final:
            check_replaceable(final)
            commit(Path(here), final, newest.save_id)
    # Only now can the source's own path be relied on, which may just have been renamed.
    receives = elected and here is None
    if any(all_objects(receives)):
        _send(newest, final, receives, layout)


def warn_of(problems: list[str], chosen: Newest, layout: NodeLayout) -> None:
    """Says on rank 0 which checkpoints were passed over, and why."""
    if problems and layout.rank == 0:
        warnings.warn(
            f"checkpoint {chosen.relative or chosen.save_id} is used, these are not complete:\n" + "\n".join(problems),
            stacklevel=3,
        )


def _send(newest: Newest, final: Path, receives: bool, layout: NodeLayout) -> None:
    what = f"sending checkpoint {final.name} to the nodes that lack it"
    is_source = layout.rank == newest.source
    text, manifest = b"", None
    with errors_on_all_ranks(what):
        if is_source:
            text, manifest = (final / MANIFEST).read_bytes(), Manifest.read(final)
        if receives:
            check_replaceable(final)
    # An identity of its own: a transfer of this checkpoint that was killed may have left a folder.
    text, manifest, identity = object_from(newest.source, (text, manifest, uuid.uuid4().hex))
    # From here on a rank that fails keeps its error, and takes part in all broadcasts.
    attempt = Attempt()
    with ExitStack() as stack:
        folder = None
        if receives:
            folder = attempt(lambda: enter_partial_folder(stack, final, identity))
        raise_failure_on_all_ranks(what, attempt.error)  # before anything long is sent
        # In the order of the source's manifest, which all ranks have got.
        for name, written in manifest.files.items():
            _send_file(name, written, final if is_source else None, folder, newest.source, layout, attempt)
        # The source's bytes, and last, as in a save: a transfer that is killed leaves nothing that looks complete.
        if folder is not None:
            attempt(lambda: write_file(folder / MANIFEST, text))
        raise_failure_on_all_ranks(what, attempt.error)
        with errors_on_all_ranks(what):
            if folder is not None:
                commit(folder, final, newest.save_id)


def _send_file(
    name: str,
    written: WrittenFile,
    source_folder: Path | None,
    target_folder: Path | None,
    source: int,
    layout: NodeLayout,
    attempt: Attempt,
) -> None:
    """Broadcasts one file in chunks; ranks that neither have nor need it only take part."""
    checksum = 0
    buffer = torch.empty(min(CHUNK_BYTES, written.bytes), dtype=torch.uint8)
    reader = attempt(lambda: open(source_folder / name, "rb")) if source_folder is not None else None
    writer = attempt(lambda: open(target_folder / name, "xb")) if target_folder is not None else None
    # As many broadcasts on all ranks: their number comes from the manifest, and not from what a rank can read.
    for start in range(0, written.bytes, CHUNK_BYTES):
        chunk = buffer[: written.bytes - start]
        if reader is not None:
            attempt(lambda chunk=chunk: _fill(chunk, reader))
        broadcast_bytes(chunk, source, layout.device)
        if writer is not None:
            checksum = zlib.crc32(chunk.numpy(), checksum)
            attempt(lambda chunk=chunk: writer.write(chunk.numpy()))
    if writer is not None:
        attempt(lambda: _to_disk(writer))
        # Of what arrived, computed on the way: a source that reads damaged bytes must not spread them.
        if checksum != written.crc32 and attempt.error is None:
            attempt.error = ValueError(f"{name} arrived damaged: its checksum does not match the manifest")
    for file in (reader, writer):
        if file is not None:
            attempt.always(file.close)  # which writes what is left in the buffer, and may fail as a write does


def _fill(chunk: torch.Tensor, file: BinaryIO) -> None:
    if file.readinto(memoryview(chunk.numpy())) != chunk.numel():
        raise ValueError(f"{file.name} has become shorter while it was sent")


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
