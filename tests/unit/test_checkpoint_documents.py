# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Values as JSON plus tensors, type for type, and random number generators, which are such values."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, deque, namedtuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_lshdp.checkpoint import rng as checkpoint_rng
from accelerate_lshdp.checkpoint.typed_json import NotPlainError, decode, encode, tensor_paths


CPU = torch.device("cpu")

hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.floats(allow_nan=False)
    | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
values = st.recursive(
    hashable | st.just(torch.float16) | st.just(torch.Size([2, 3])) | st.just(torch.device("cpu")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=2).map(OrderedDict)
        | st.sets(hashable, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
    ),
    max_leaves=12,
)


def through_json(value):
    tensors = {}
    document = json.loads(json.dumps(encode(value, "root", tensors), allow_nan=False))
    assert sorted(tensor_paths(document)) == sorted(tensors)
    return decode(document, tensors)


def same_types(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return [*map(repr, left)] == [*map(repr, right)] and all(same_types(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same_types, left, right))
    return True


@settings(max_examples=200, deadline=None)
@given(values)
def test_values_come_back_type_for_type(value):
    result = through_json(value)
    assert result == value and same_types(result, value)


def test_values_that_compare_badly():
    value = {
        "nan": float("nan"),
        "infinite": -float("inf"),
        "counter": Counter({3: 2, 1: 1}),
        "scalars": [numpy.float32(0.1), numpy.int16(-3), numpy.bool_(True), numpy.float64("inf")],
        "array": numpy.arange(6, dtype=">i4").reshape(2, 3).T,
        "tensor": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "~": torch.tensor(3)},
        "$": "a key of our own",
    }
    result = through_json(value)
    assert result["nan"] != result["nan"] and result["infinite"] == -float("inf")
    assert type(result["counter"]) is Counter and list(result["counter"].elements()) == [3, 3, 1]
    assert [(type(item), item) for item in result["scalars"]] == [(type(item), item) for item in value["scalars"]]
    assert numpy.array_equal(result["array"], value["array"]) and result["array"].dtype == numpy.int32
    assert result["tensor"].dtype == torch.bfloat16 and torch.isnan(result["tensor"][1])
    assert (int(result["a/b"]), int(result["a"]["b"]), int(result["a"]["~"])) == (1, 2, 3)
    assert result["$"] == "a key of our own"


Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (object(), "builtins.object"),
        (Point(1), "Point"),
        (numpy.array(["text"]), "numpy.ndarray"),
        (torch.eye(2).to_sparse(), "sparse"),
        (print, "builtin_function_or_method"),
    ],
)
def test_anything_else_is_named_with_its_path(value, found):
    with pytest.raises(NotPlainError, match=f"root/here/1 is a .*{found}"):
        encode({"here": [0, value]}, "root", {})


def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(())), random.gauss(0, 1), numpy.random.randn()


def test_generators_go_on_where_they_stopped():
    checkpoint_rng.derive(1, 2, 3)
    draw()
    before = checkpoint_rng.capture(CPU)
    expected = draw()
    state = through_json(before)
    assert checkpoint_rng.fits(state, CPU)
    checkpoint_rng.restore(state, CPU)
    assert draw() == expected


def test_derived_streams_repeat_and_differ():
    seen = {}
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        checkpoint_rng.derive(*key)
        first = draw()
        checkpoint_rng.derive(*key)
        assert draw() == first
        seen[key] = first
    assert all(len({drawn[index] for drawn in seen.values()}) == 4 for index in range(5))


def test_generators_of_another_kind_of_device_do_not_fit():
    state = {**checkpoint_rng.capture(CPU), "device_type": "cuda"}
    assert not checkpoint_rng.fits(state, CPU)
