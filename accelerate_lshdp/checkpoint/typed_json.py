# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Converts Python values to JSON plus tensors, and back, type for type, without pickle.

JSON's own values stand for themselves. Everything else is an object with the key ``"$"``: tuples, dictionaries with
keys other than strings, collections.Counter (MultiStepLR has one), numpy scalars and arrays, bytes, dtypes, and
tensors, which are kept beside the document under their path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor


_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_SEQUENCE_NAMES = {kind: name for name, kind in _SEQUENCES.items()}
_MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_MAPPING_NAMES = {kind: name for name, kind in _MAPPINGS.items()}


class NotPlainError(TypeError):
    """A value is neither JSON nor a tensor nor one of the few types that this module knows."""


def join(path: str, key: str) -> str:
    """`path/key`; a slash inside the key is escaped as in JSON pointers, so that no two paths are the same."""
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A JSON value for `value`; its tensors are added to `tensors` under paths that start with `path`.

    Raises:
        NotPlainError: naming the path and the type of a value that would not come back as it is.
    """
    # By exact type: a subclass would come back as its base. Types that are not known are an error, never a guess.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    # JSON has no infinities and no NaN; repr gives back the same bits of any other float.
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if kind is list:
        return [encode(item, join(path, str(index)), tensors) for index, item in enumerate(value)]
    # A dictionary with a key "$" would be taken for one of ours, so it goes the way of those with other keys.
    if kind is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: encode(item, join(path, key), tensors) for key, item in value.items()}
    if kind in _MAPPING_NAMES:
        return {"$": _MAPPING_NAMES[kind], "items": encode([list(pair) for pair in value.items()], path, tensors)}
    if kind in _SEQUENCE_NAMES:
        return {"$": _SEQUENCE_NAMES[kind], "items": encode(list(value), path, tensors)}
    if kind is deque:
        return {"$": "deque", "maxlen": value.maxlen, "items": encode(list(value), path, tensors)}
    if kind is bytes:
        return {"$": "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if kind is numpy.ndarray and value.dtype.kind in "biufc":
        array = numpy.array(value, order="C", dtype=value.dtype.newbyteorder("="))  # writable, as torch wants it
        _add(tensors, path, torch.from_numpy(array))
        return {"$": "array", "tensor": path}
    if isinstance(value, numpy.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"$": "scalar", "dtype": value.dtype.name, "value": encode(value.item(), path, tensors)}
    if kind is torch.dtype:
        return {"$": "dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$": "device", "name": str(value)}
    raise NotPlainError(f"{path} is a {kind.__module__}.{kind.__qualname__}, neither JSON nor a tensor")


def decode(document: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that `encode` made a document of; `tensors` holds the tensors that it put beside it.

    Raises:
        ValueError: if the document was not made by `encode`.
    """
    if isinstance(document, list):
        return [decode(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    if "$" not in document:
        return {key: decode(item, tensors) for key, item in document.items()}
    kind = document["$"]
    if kind in _MAPPINGS:
        # Pairs in a list, so that keys of any type are decoded as values are, and keep their order.
        return _MAPPINGS[kind](dict(decode(document["items"], tensors)))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(document["items"], tensors))
    if kind == "deque":
        return deque(decode(document["items"], tensors), maxlen=document["maxlen"])
    if kind == "float":
        return float(document["value"])
    if kind == "bytes":
        return base64.b64decode(document["base64"])
    if kind == "scalar":
        scalar = numpy.dtype(document["dtype"])
        if scalar.kind not in "biuf":
            raise ValueError(f"a document holds a scalar of the unknown type {document['dtype']!r:.60}")
        return scalar.type(decode(document["value"], tensors))
    if kind == "dtype":
        dtype = getattr(torch, document["name"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a document holds the unknown dtype {document['name']!r:.60}")
        return dtype
    if kind == "device":
        return torch.device(document["name"])
    if kind == "tensor":
        return tensors[document["tensor"]]
    if kind == "array":
        return tensors[document["tensor"]].numpy()
    raise ValueError(f"a document holds the unknown type {kind!r:.60}")


def tensor_paths(document: Any) -> list[str]:
    """The paths of all tensors that a document refers to."""
    if isinstance(document, list):
        return [path for item in document for path in tensor_paths(item)]
    if not isinstance(document, dict):
        return []
    if document.get("$") in ("tensor", "array"):
        return [document["tensor"]]
    return [path for item in document.values() for path in tensor_paths(item)]


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    # Subclasses (quantised, masked, ...) may compute with more than their elements, and would come back as plain
    # tensors.
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(value, DTensor):
        raise NotPlainError(f"{path} is a {type(value).__qualname__}, a kind of tensor that a checkpoint cannot hold")
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise NotPlainError(f"{path} is a {value.layout} tensor on {value.device}, which a checkpoint cannot hold")
    _add(tensors, path, value.detach())
    return {"$": "tensor", "tensor": path}


def _add(tensors: dict[str, torch.Tensor], path: str, value: torch.Tensor) -> None:
    if path in tensors:
        raise ValueError(f"two tensors have the path {path}")
    tensors[path] = value
