# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Marks that recognise a batch by its tensors without keeping them alive.

A script may keep a batch, skip it, view it or hand parts of it to the model. What stays the same is the memory that
its tensors lie in, so a mark is a weak reference to a storage and the part of it that the tensor covers. Addresses
would not do: the allocator gives the memory of a batch that was dropped to the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


#: How deep and how far a batch is searched for tensors; what lies beyond is recognised by the tensors found before.
_DEPTH, _MOST_TENSORS = 4, 64


class TensorMark:
    """A weak reference to a tensor of a batch, by which its views are recognised, too.

    Args:
        tensor: of any layout; one without a storage (sparse, nested) is recognised itself only.
    """

    __slots__ = ("key", "begin", "end", "_storage", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        extent = _extent(tensor)
        self._storage: StorageWeakRef | None = None
        self._tensor: weakref.ref[torch.Tensor] | None = None
        self.begin = self.end = 0
        if extent is None:
            self._tensor = weakref.ref(tensor)
            self.key: tuple[str, int] = ("tensor", id(tensor))
            return
        storage = tensor.untyped_storage()
        # While the weak reference exists, torch does not use this address for another storage: it is safe as a key.
        self._storage = StorageWeakRef(storage)
        self.key = ("storage", storage._cdata)
        self.begin, self.end = extent
        if storage.nbytes() > self.end - self.begin:
            # A view of something larger, such as the whole dataset, whose storage outlives the batch.
            self._tensor = weakref.ref(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorMark:
        # torch's weak reference counts itself down when it is dropped: copied attribute by attribute, it would do so
        # twice, and what the storage has would be freed under whoever uses it.
        return self

    def __copy__(self) -> TensorMark:
        return self

    def __reduce__(self) -> tuple:
        return _mark_of_nothing, ()  # another process has other addresses

    @property
    def alive(self) -> bool:
        """Whether the script, or autograd for it, still holds the tensor or (if it is no view) a view of it."""
        if self._tensor is not None:
            return self._tensor() is not None
        return not self._storage.expired()

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which has this mark's key, lies inside the tensor of this mark."""
        if self._storage is None:
            return self._tensor() is tensor
        extent = _extent(tensor)
        return extent is not None and self.begin <= extent[0] and extent[1] <= self.end

    def is_of_same(self, other: TensorMark) -> bool:
        """Whether both marks are of the same memory, so neither tells one batch from another."""
        return (self.key, self.begin, self.end) == (other.key, other.begin, other.end)


def _mark_of_nothing() -> TensorMark:
    """The mark of a tensor that is gone."""
    mark = TensorMark.__new__(TensorMark)
    mark.key, mark.begin, mark.end = ("tensor", 0), 0, 0
    mark._storage, mark._tensor = None, _gone
    return mark


def _gone() -> None:
    """What a weak reference gives when its object is gone."""


def key_of(tensor: torch.Tensor) -> tuple[str, int]:
    """The key that a mark of ``tensor``, or of what it is a view of, would have."""
    return ("tensor", id(tensor)) if _extent(tensor) is None else ("storage", tensor.untyped_storage()._cdata)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First byte in the storage and the one after the last; None for a tensor without a storage of its own."""
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # that torch.func works on, inside grad or vmap
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return begin, begin + (last + 1) * tensor.element_size()


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors of a batch or of the arguments of a forward, in order, empty ones left out.

    Args:
        data: a tensor, or mappings, lists, tuples and plain objects that hold tensors.
    """
    found: list[torch.Tensor] = []
    for tensor in _search(data, _DEPTH):
        found.append(tensor)
        if len(found) == _MOST_TENSORS:
            break
    return found


def _search(data: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        if data.numel():
            yield data
    elif depth == 0 or isinstance(data, (str, bytes, type, torch.nn.Module)):
        return
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _search(value, depth - 1)
    elif isinstance(data, (list, tuple)):
        # Not token by token: what begins with a number is no list of tensors.
        if data and not isinstance(data[0], (int, float, str)):
            for value in data:
                yield from _search(value, depth - 1)
    elif hasattr(data, "__dict__") and not callable(data):
        for value in vars(data).values():
            yield from _search(value, depth - 1)
