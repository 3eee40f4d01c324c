# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The buckets of models with weights in slices: each gradient is in them once, or twice to be added, in one place."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accelerate_lshdp.engine.stores.shared.memory import ALIGNMENT, Layout
from accelerate_lshdp.engine.stores.shared.node_buckets import NodeBuckets
from accelerate_lshdp.engine.stores.shared.sliced_layout import lay_out_slices
from accelerate_lshdp.engine.stores.sliced.choice import SlicedChoice
from accelerate_lshdp.engine.wire.buckets import fill_buckets


@st.composite
def models(draw: st.DrawFn) -> tuple[list[nn.Parameter], dict[int, SlicedChoice]]:
    """Parameters, and some of them in slices, in modules of their own or in several."""
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    shapes = draw(st.lists(st.tuples(st.integers(4, 300), st.sampled_from((1, 3, 8, 40))), min_size=1, max_size=6))
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    chosen = {}
    for index, parameter in enumerate(parameters):
        modules = draw(st.sampled_from(((), ("head",), ("embedding",), ("embedding", "head"), ("head", "head"))))
        if modules:
            made = [nn.Embedding(1, 1) if each == "embedding" else nn.Linear(1, 1) for each in modules]
            places = tuple((module, "weight") for module in made)
            chosen[index] = SlicedChoice(f"p{index}", parameter, places, draw(st.integers(1, 5)))
    return parameters, chosen


@settings(max_examples=200, deadline=None)
@given(models(), st.sampled_from((None, 64, 4096)), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_gradients_are_in_buckets(
    model: tuple[list[nn.Parameter], dict[int, SlicedChoice]], bucket_bytes: int | None, nodes: list[int]
) -> None:
    parameters, chosen = model
    layout, of_weights = lay_out_slices(parameters, chosen, bucket_bytes, len(nodes))
    assert of_weights.keys() == chosen.keys()
    starts, ends = ([torch.zeros(p.shape) for p in parameters] for _ in range(2))
    for bucket in layout.buckets:
        for piece in (layout.pieces[number] for number in bucket):
            piece.of(starts[piece.parameter]).add_(float(piece.starts))
            piece.of(ends[piece.parameter]).add_(float(piece.ends))
    # Each number of a gradient takes the place of what was there once, and is complete once.
    assert all(bool((each == 1).all()) for each in (*starts, *ends))
    groups = [list(range(sum(nodes[:node]), sum(nodes[: node + 1]))) for node in range(len(nodes))]
    topology = SimpleNamespace(node=0, node_groups=groups)
    members = [
        [layout.pieces[piece].of(parameters[layout.pieces[piece].parameter].detach()) for piece in bucket]
        for bucket in layout.buckets
    ]
    made = NodeBuckets(topology, members, Layout(), owned_with=layout.owned_with, again=layout.again)
    owners = [made._owners(size) for size in nodes]
    bucket_of = {piece: number for number, bucket in enumerate(layout.buckets) for piece in bucket}
    for index, pieces in of_weights.items():
        size = parameters[index].dtype.itemsize * parameters[index].shape[1]
        for numbers in filter(None, (pieces.first, pieces.last)):
            places = [made.places[bucket_of[number]] for number in numbers]
            rows = [layout.pieces[number].rows for number in numbers]
            assert [place - places[0] for place in places] == [own.start * size for own in rows]
            assert all(place % ALIGNMENT == 0 for place in places)
        every = [bucket_of[number] for number in (*pieces.first, *pieces.last)]
        assert all(len({own[bucket] for bucket in every}) == 1 for own in owners)
        if pieces.first:  # the later ones go on where these are
            assert [bucket_of[number] for number in pieces.first] == [
                layout.again[bucket_of[number]] for number in pieces.last
            ]
            assert max(map(bucket_of.get, pieces.first)) < min(map(bucket_of.get, pieces.last))


def test_without_slices_buckets_are_those_of_whole_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (10, 2000, 30, 500)]
    layout, of_weights = lay_out_slices(parameters, {}, 4096, 2)
    assert layout.buckets == fill_buckets(parameters, 4096, 2)
    assert not of_weights and not layout.again and not layout.owned_with
