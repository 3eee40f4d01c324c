# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Writes safetensors files tensor by tensor and reads them slice by slice.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian length of the header, the header
(JSON: name -> dtype, shape, byte range; padded with spaces to a multiple of 8), the bytes of all tensors without gaps.
Names, dtypes and shapes are known before the first tensor is, so the header is written first and no more than one
tensor is in memory.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from accelerate_lshdp.runtime.object_exchange import as_bytes


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
#: Bytes handed to the file at once.
WRITE_BYTES = 1 << 24


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of one tensor, as the header of a file has them.

    Raises:
        TypeError: if safetensors has no such dtype.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise TypeError(f"{self.name!r} has dtype {self.dtype}, which a safetensors file cannot hold")

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """`entries` with the largest elements first.

    Every tensor then starts at a multiple of its element size, as readers that map the file need.
    """
    # `sorted` is stable: tensors of one element size keep the order that all ranks have given them.
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


class SafetensorsWriter:
    """Writes one file, one tensor at a time.

        with SafetensorsWriter(path, entries, metadata={"format": "pt"}) as writer:
            for entry in writer.entries:
                writer.write(entry.name, tensor_of(entry))
        writer.size, writer.crc32          # of the whole file, which is on disk now

    Args:
        path: a file that does not exist yet.
        entries: names (unique), dtypes and shapes of all tensors, in any order; `writer.entries` has them in the order
            in which they are to be written.
        metadata: strings for the header's ``__metadata__``.

    Raises:
        ValueError: for a duplicate name, or a tensor out of order or not as announced.
        OSError: as the file system raises it.
    """

    def __init__(
        self, path: str | os.PathLike, entries: Iterable[TensorEntry], metadata: dict[str, str] | None = None
    ):
        self.entries = in_file_order(entries)
        self.size = 0
        self.crc32 = 0
        self._next = 0
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for entry in self.entries:
            if entry.name in header or entry.name == "__metadata__":
                raise ValueError(f"{entry.name!r} is no possible name of a tensor, or stands for two tensors")
            header[entry.name] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.bytes],
            }
            offset += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        # Tensors begin at a multiple of 8 bytes then: readers map them in place.
        text += b" " * (-len(text) % 8)
        # "x": a file of that name would be another writer's. Checksum and size are taken as bytes are written, so that
        # the file need not be read again.
        self._file = open(path, "xb")
        try:
            self._put(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Appends the next tensor of `entries`."""
        if self._next == len(self.entries):
            raise ValueError(f"{name!r} came after the last of {len(self.entries)} tensors")
        entry = self.entries[self._next]
        if (name, tensor.dtype, tuple(tensor.shape)) != (entry.name, entry.dtype, entry.shape):
            raise ValueError(
                f"expected {entry.name!r}, {entry.dtype} {list(entry.shape)}, "
                f"found {name!r}, {tensor.dtype} {list(tensor.shape)}"
            )
        # In pieces, without a copy of the tensor: a slice of a memoryview shares its memory. numpy has no bfloat16, so
        # the bytes are viewed by torch.
        data = memoryview(as_bytes(tensor.cpu()).numpy())
        for start in range(0, len(data), WRITE_BYTES):
            self._put(data[start : start + WRITE_BYTES])
        self._next += 1

    def close(self) -> None:
        """Checks that all tensors were written, and brings them to the disk."""
        if self._next != len(self.entries):
            raise ValueError(f"{len(self.entries) - self._next} of {len(self.entries)} tensors were not written")
        # Before the folder is renamed to its final name: else a power failure could leave that name with an empty
        # file.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)


class SafetensorsReader:
    """Reads whole tensors or slices of a file that stays on disk.

    Raises:
        ValueError: if the file is no safetensors file, or has not the tensor that is asked for.
        OSError: as the file system raises it.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        # Maps the file: opening reads the header, and slices read their own pages.
        self.path = Path(path)
        try:
            self._file = safe_open(str(path), framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
        self.names = frozenset(self._file.keys())

    def entry(self, name: str) -> TensorEntry:
        if name not in self.names:
            raise ValueError(f"{self.path} holds no tensor {name!r}")
        part = self._file.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise ValueError(f"{name!r} in {self.path} has the unknown dtype {part.get_dtype()}")
        return TensorEntry(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or one region of it (a slice with start and stop for each dimension), on the CPU.

        The result may share memory with the file's pages: copy it before keeping it or writing to it.
        """
        entry = self.entry(name)
        if region is None or not entry.shape:
            return self._file.get_tensor(name)
        # safetensors refuses an empty slice, which a rank has of a tensor with fewer rows than ranks.
        if any(part.start >= part.stop for part in region):
            return torch.empty([max(part.stop - part.start, 0) for part in region], dtype=entry.dtype)
        return self._file.get_slice(name)[region]


class StoredTensors(Mapping):
    """The tensors of a file by name; every access reads a copy."""

    def __init__(self, reader: SafetensorsReader) -> None:
        self.reader = reader

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.reader.read(name).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader.names)

    def __len__(self) -> int:
        return len(self.reader.names)
