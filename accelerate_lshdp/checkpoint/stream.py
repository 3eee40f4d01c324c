# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Streams full tensors, whole or sharded in this run, into a file on each node, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.checkpoint.model import ModelTensors
from accelerate_lshdp.checkpoint.shards import gather_full
from accelerate_lshdp.checkpoint.tensors import SafetensorsWriter, TensorEntry, in_file_order
from accelerate_lshdp.runtime.object_exchange import NodeLayout, broadcast_tensor, raise_failure_on_all_ranks


@dataclass(frozen=True)
class TensorSource:
    """The source of the full tensor of one entry: this rank's value, shards of a mesh, or another rank.

    Attributes:
        entry: name, dtype and full shape.
        tensor: this rank's value; a DTensor is gathered over its own mesh. None where another rank has it.
        rank: the one rank, among those that exchange, whose plain tensor is meant; None if every node has its own
            replica or shards.
        group: the ranks that get the tensor of ``rank``: those of its node. None: all ranks.
    """

    entry: TensorEntry
    tensor: torch.Tensor | None
    rank: int | None = None
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, rank: int | None = None) -> TensorSource:
        return cls(TensorEntry(name, tensor.dtype, tuple(tensor.shape)), tensor, rank)

    def full(self, layout: NodeLayout) -> torch.Tensor:
        """The full tensor on this rank (collective)."""
        # Which way it comes is the same on all ranks, as they have the same list of sources.
        if self.rank is None:
            return gather_full(self.tensor)
        return broadcast_tensor(self.tensor, self.entry.shape, self.entry.dtype, self.rank, layout, self.group)


@dataclass(frozen=True)
class WrittenFile:
    """Size in bytes and CRC-32 of a file, as a manifest lists it."""

    bytes: int
    crc32: int


def stream_to_file(
    path: str | os.PathLike, sources: Sequence[TensorSource], layout: NodeLayout, is_writer: bool
) -> tuple[WrittenFile | None, Exception | None]:
    """Runs through `sources`, which is the same list on all ranks, and writes them where `is_writer` (collective).

    A writer that fails goes on taking part, so that no other rank waits for it in vain: the caller has to exchange the
    error that is returned.
    """
    # The order of the file, on all ranks, writers or not: each tensor is a collective.
    by_name = {source.entry.name: source for source in sources}
    order = [by_name[entry.name] for entry in in_file_order(source.entry for source in sources)]
    writer: SafetensorsWriter | None = None
    error: Exception | None = None
    if is_writer:
        try:
            writer = SafetensorsWriter(path, [source.entry for source in sources], {"format": "pt"})
        except (OSError, ValueError) as caught:
            error = caught
    for source in order:
        full = source.full(layout)
        # A disk that is full ends the writing here, not the rounds of gathering.
        if writer is not None and error is None:
            try:
                writer.write(source.entry.name, full)
            except (OSError, ValueError) as caught:
                error = caught
        # Before the next one is gathered: a rank holds one full tensor at a time.
        del full
    if writer is None:
        return None, error
    # Without an error this flushes and synchronises the file; with one it only closes it.
    try:
        writer.__exit__(type(error) if error else None)
    except (OSError, ValueError) as caught:
        error = error or caught
    return (None, error) if error else (WrittenFile(writer.size, writer.crc32), None)


def save_model_file(
    path: str | os.PathLike, model: nn.Module, layout: NodeLayout, is_writer: bool, is_collective: bool = True
) -> None:
    """Writes a model as one safetensors file that `from_pretrained` loads. Tied tensors come once.

    Args:
        path: the file; it is replaced as a whole if it exists. Its folder is made.
        model: prepared or plain.
        layout: the place of this rank.
        is_writer: whether this rank writes.
        is_collective: whether all ranks call this, as they have to for a sharded model. False: any of them may.

    Raises:
        RuntimeError: a writer failed; on all ranks if they all take part.
    """
    sources = [TensorSource.of(name, tensor) for name, tensor in ModelTensors.of(model).tensors.items()]
    folder, name = os.path.split(os.fspath(path))
    # Of this node alone: the writers of all nodes write at the same time, and may share the folder.
    # In the same folder, since a rename is atomic inside one file system only.
    partial = os.path.join(folder, f".{name}.node{layout.node}.partial")
    error: Exception | None = None
    if is_writer:
        try:
            os.makedirs(folder or ".", exist_ok=True)
            if os.path.lexists(partial):  # of a killed writer
                os.unlink(partial)
        except OSError as caught:
            error = caught
    _, failed = stream_to_file(partial, sources, layout, is_writer and error is None)
    error = error or failed
    if is_writer and error is None:
        try:
            # Atomic: readers see the old file or the new one, whole.
            os.replace(partial, path)
        except OSError as caught:
            error = caught
    what = f"saving the model to {os.fspath(path)}"
    if is_collective:
        raise_failure_on_all_ranks(what, error)
    elif error is not None:
        raise RuntimeError(f"{what} failed: {type(error).__name__}: {error}") from error
