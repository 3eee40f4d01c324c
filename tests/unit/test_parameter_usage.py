# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""For which parameters ranks have gradients, as they tell each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate_lshdp.runtime.parameter_usage import ToldUsage, Used


@pytest.mark.parametrize(
    ("usage", "expected"), [([1, 1], Used.ALL), ([0, 0], Used.NONE), ([1, 0], Used.SOME), ([], Used.NONE)]
)
def test_a_model_is_used_by_all_none_or_some(usage: list[float], expected: Used) -> None:
    assert Used.of(torch.tensor(usage)) is expected


bits = st.lists(st.booleans(), min_size=3, max_size=3)


@given(st.lists(st.lists(st.tuples(bits, bits), min_size=2, max_size=2), min_size=1, max_size=8))
def test_what_is_known_is_right_whatever_ranks_used_before(
    steps: list[list[tuple[list[bool], list[bool]]]],
) -> None:
    """Steps of two ranks with two models."""
    ranks = [ToldUsage() for _ in range(2)]
    for step in steps:
        usages = np.array(step, np.float64)  # ranks, models, parameters
        bytes_told = [
            [ranks[rank].told(model, torch.from_numpy(usages[rank, model])) for model in range(2)] for rank in range(2)
        ]
        told = ranks[0].hear(np.array(bytes_told, np.uint8))
        for model in range(2):
            expected = usages[:, model].any(axis=0)
            known = [each.known(model, told[:, model], 3) for each in ranks]
            assert (known[0] is None) == (known[1] is None)
            for rank, (each, found) in enumerate(zip(ranks, known, strict=True)):
                if found is None:
                    each.take(model, torch.from_numpy(usages[rank, model]), expected)
                else:
                    assert found.tolist() == expected.tolist() and found.dtype == bool


@given(bits, bits)
def test_nothing_is_told_twice(first: list[bool], second: list[bool]) -> None:
    ranks = [ToldUsage() for _ in range(2)]
    usages = [torch.tensor(each, dtype=torch.float64) for each in (first, second)]
    for each, usage in zip(ranks, usages, strict=True):
        each.take(0, usage, np.array(first) | np.array(second))
    told = np.array([[each.told(0, usage)] for each, usage in zip(ranks, usages, strict=True)], np.uint8)
    assert all(each.known(0, each.hear(told)[:, 0], 3) is not None for each in ranks)


def test_a_rank_that_has_missed_something_is_an_error() -> None:
    ranks = [ToldUsage() for _ in range(2)]
    some, united = torch.tensor([1.0, 0.0]), np.array([True, False])
    for each in ranks:
        each.take(0, some, united)
    told = np.array([[each.told(0, some)] for each in ranks], np.uint8)
    known = ranks[0].known(0, ranks[0].hear(told)[:, 0], 2)
    assert known is not None and known.tolist() == [True, False]
    ranks[1].take(0, some, united)
    told = np.array([[each.told(0, some)] for each in ranks], np.uint8)
    with pytest.raises(RuntimeError, match=r"found that the ranks \[1\] know other parameters to be used than rank 0"):
        ranks[0].hear(told)
