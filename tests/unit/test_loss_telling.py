# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a rank tells of a loss arrives as it was seen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate_lshdp.accelerator.losses.observations import SeenLoss, number_of
from accelerate_lshdp.accelerator.losses.parts import Composition
from accelerate_lshdp.accelerator.losses.telling import ranks_with_values, seen_losses, told
from accelerate_lshdp.accelerator.losses.values import CrossEntropies


values = st.floats(allow_nan=True, allow_infinity=True)
flags = st.booleans().map(float)
counts = st.integers(0, 2**32 - 1).map(float)
kinds = st.sampled_from([None, *Composition]).map(number_of)
none = st.just(math.nan)
seen_by_ranks = st.builds(
    SeenLoss,
    position=st.integers(0, 2**48 - 1).map(float),
    looks=st.integers(0, 2**32 - 1).map(float) | none,
    asks=flags,
    known=kinds,
    loss=values | none,
    own=values | none,
    multiple=values | none,
    factor=values | st.just(1.0),
    items=values | none,
    kind_of_class=kinds,
    has_auxiliary=flags,
    low_precision=flags,
    dimensions=st.integers(0, 5).map(float),
    looked=flags,
    compiled=flags,
    counted=flags,
    even=flags,
    samples=counts,
    labels=counts,
    shifted=counts,
    ignored=counts,
    values=st.builds(CrossEntropies, *[values] * len(CrossEntropies._fields)) | st.just(CrossEntropies()),
)


def numbers(seen: SeenLoss) -> list[Any]:
    return [*seen[:-1], *seen.values]


@given(st.lists(seen_by_ranks, min_size=1, max_size=3))
def test_what_is_seen_arrives(everyone: list[SeenLoss]) -> None:
    pairs = [told(seen) for seen in everyone]
    rows = torch.stack([row for row, _ in pairs])
    more = {rank: each for rank, (_, each) in enumerate(pairs) if each is not None}
    assert ranks_with_values(rows) == list(more)
    for seen, found in zip(everyone, seen_losses(rows, more), strict=True):
        np.testing.assert_array_equal(numbers(found), numbers(seen))


def test_what_nobody_has_compared_is_told_in_few_bytes() -> None:
    everyone = SeenLoss(
        *[1.0] * 4, *[math.nan] * 3, 1.0, math.nan, *[1.0] * 12, values=CrossEntropies()
    )  # no loss, own, multiple and items
    row, more = told(everyone)
    assert row.dtype == torch.uint8 and len(row) == 33 and more is None
    assert told(everyone._replace(loss=2.0))[1] is not None
