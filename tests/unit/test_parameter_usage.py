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
def test_counts_are_right_whatever_ranks_used_before(steps: list[list[tuple[list[bool], list[bool]]]]) -> None:
    """Steps of two ranks with two models."""
    ranks = [ToldUsage(rank) for rank in range(2)]
    for step in steps:
        usages = np.array(step, np.float64)  # ranks, models, parameters
        pairs = [
            [ranks[rank].told(model, torch.from_numpy(usages[rank, model])) for model in range(2)] for rank in range(2)
        ]
        used = ranks[0].used(np.array(pairs, np.uint8))
        for model in range(2):
            expected = usages[:, model].sum(axis=0).tolist()
            for each in ranks:
                if (used[:, model] == Used.SOME).any():
                    count = each.take(model, usages[:, model].astype(np.uint8))
                else:
                    count = each.count(model, used[:, model], 3)
                assert count.tolist() == expected and count.dtype == torch.float64


def test_a_rank_that_has_missed_something_is_an_error() -> None:
    ranks = [ToldUsage(rank) for rank in range(2)]
    some = torch.tensor([1.0, 0.0])
    for each in ranks:
        each.take(0, np.array([[1, 0], [1, 0]]))
    told = np.array([[each.told(0, some)] for each in ranks], np.uint8)
    assert ranks[0].used(told).tolist() == [[Used.AS_TOLD], [Used.AS_TOLD]]
    ranks[1].take(0, np.array([[1, 0], [1, 0]]))
    told = np.array([[each.told(0, some)] for each in ranks], np.uint8)
    with pytest.raises(RuntimeError, match=r"found that the ranks \[1\] know other parameters to be used than rank 0"):
        ranks[0].used(told)
