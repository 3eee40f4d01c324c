# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The streaming safetensors writer and the sliced reader, against the safetensors library."""

from __future__ import annotations

import itertools
import json
import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from accelerate_lshdp.checkpoint.tensors import DTYPE_NAMES, SafetensorsReader, SafetensorsWriter, TensorEntry


numbers = itertools.count()
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
specifications = st.tuples(st.sampled_from(list(DTYPE_NAMES)), st.lists(st.integers(0, 4), max_size=3).map(tuple))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits, as not-a-numbers and denormals have to survive, too."""
    size = math.prod(shape) * dtype.itemsize
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.bool)
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(*(value.contiguous().flatten().view(torch.uint8) for value in (left, right)))


def write(path, tensors, metadata=None):
    entries = [TensorEntry(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    with SafetensorsWriter(path, entries, metadata) as writer:
        for entry in writer.entries:
            writer.write(entry.name, tensors[entry.name])
    return writer


@settings(max_examples=80, deadline=None)
@given(layout=st.dictionaries(names, specifications, max_size=6))
def test_safetensors_reads_what_the_writer_wrote(tmp_path_factory, layout):
    path = tmp_path_factory.getbasetemp() / f"written-{next(numbers)}.safetensors"
    tensors = {name: random_tensor(*specification) for name, specification in layout.items()}
    writer = write(path, tensors, {"format": "pt"})
    data = path.read_bytes()
    assert (writer.size, writer.crc32) == (len(data), zlib.crc32(data))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % value.itemsize == 0 for name, value in tensors.items())
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], value) for name, value in tensors.items())


@settings(max_examples=60, deadline=None)
@given(specification=specifications, data=st.data())
def test_a_slice_is_the_slice_of_the_whole(tmp_path_factory, specification, data):
    path = tmp_path_factory.getbasetemp() / f"sliced-{next(numbers)}.safetensors"
    dtype, shape = specification
    tensor = random_tensor(dtype, shape)
    write(path, {"before": torch.zeros(3, dtype=torch.uint8), "wanted": tensor})
    bounds = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
    region = tuple(slice(*pair) for pair in bounds)
    assert same_bits(SafetensorsReader(path).read("wanted", region), tensor[region])


def test_tensors_that_are_not_contiguous_are_written_by_value(tmp_path):
    tensor = torch.arange(12.0).reshape(3, 4).t()
    write(tmp_path / "a", {"a": tensor, "b": tensor[1:, ::2]})
    loaded = load_file(tmp_path / "a")
    assert torch.equal(loaded["a"], tensor) and torch.equal(loaded["b"], tensor[1:, ::2])


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_tensor_other_than_announced_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"expected 'a', torch.float32 \[2\], found 'a'"):
        with SafetensorsWriter(tmp_path / "a", [TensorEntry("a", torch.float32, (2,))]) as writer:
            writer.write("a", wrong)


def test_a_missing_tensor_is_not_overlooked(tmp_path):
    with pytest.raises(ValueError, match="1 of 1 tensors were not written"):
        with SafetensorsWriter(tmp_path / "a", [TensorEntry("a", torch.float32, (2,))]):
            pass


def test_names_have_to_be_unique(tmp_path):
    entry = TensorEntry("a", torch.float32, (2,))
    with pytest.raises(ValueError, match="two tensors"):
        SafetensorsWriter(tmp_path / "a", [entry, entry])


def test_a_dtype_without_a_name_in_the_format_is_refused():
    with pytest.raises(TypeError, match="'a' has dtype torch.complex128"):
        TensorEntry("a", torch.complex128, (1,))


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"not a header at all")
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        SafetensorsReader(tmp_path / "a")


def test_a_name_that_is_not_there(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a")
    with pytest.raises(ValueError, match="holds no tensor 'b'"):
        SafetensorsReader(tmp_path / "a").read("b")
