# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A global batch is cut the same way everywhere, and nothing of it is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate_lshdp.data.cut import GlobalBatchCut, largest_remainder


@given(st.data(), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_parts_are_proportional_within_one_and_never_above_their_weight(data: st.DataObject, weights: list[int]):
    total = data.draw(st.integers(0, sum(weights)))
    parts = largest_remainder(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1
        assert part <= weight


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (3, (6, 4), (2, 1)),  # quotas 1.8 and 1.2
        (1, (5, 5), (1, 0)),  # a tie goes to the lower rank
        (2, (5, 5, 5), (1, 1, 0)),
        (16, (11, 5), (11, 5)),
        (0, (3, 1), (0, 0)),
    ],
)
def test_remainders_go_to_the_largest_then_to_the_lower_rank(total: int, weights: tuple, parts: tuple):
    assert largest_remainder(total, weights) == parts


@given(st.data(), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5))
def test_micro_batches_tile_the_global_batch_in_rank_order(data: st.DataObject, ranks: list[tuple[int, int]]):
    cut = GlobalBatchCut(tuple(size * steps for size, steps in ranks), tuple(steps for _, steps in ranks))
    total = data.draw(st.integers(0, cut.total))
    offsets = []
    for rank, (size, steps) in enumerate(ranks):
        micro_batches = cut.micro_batches(rank, total)
        lengths = [len(part) for part in micro_batches]
        assert len(micro_batches) == steps, "a short global batch keeps its number of micro-batches"
        assert max(lengths) <= size and max(lengths) - min(lengths) <= 1
        offsets.extend(offset for part in micro_batches for offset in part)
    assert offsets == list(range(total))
