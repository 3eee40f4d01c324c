# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Collectives of the emulated device: their results, and that only streams wait for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first test builds the device
]

OnDevice = Callable[..., list]


def test_results(on_device: OnDevice) -> None:
    first, second = on_device("collective_programs", "results", ranks=2)
    both = {
        "all_reduce": [3.0],
        "broadcast": [6.0],
        "all_gather": [3.0, 4.0],
        "all_gather of a list": [7.0, 8.0],
        "objects": [{"rank": 0}, {"rank": 1}],
    }
    own = {"reduce_scatter": [3.0], "all_to_all": [0.0, 1.0], "all_to_all of a list": [0.0, 1.0], "receive": [3.0]}
    assert first == {**both, **own}
    own = {
        "reduce_scatter": [21.0],
        "all_to_all": [10.0, 11.0],
        "all_to_all of a list": [10.0, 11.0],
        "receive": [2.0],
    }
    assert second == {**both, **own}


def test_the_host_does_not_wait(on_device: OnDevice) -> None:
    for queued, done in on_device("collective_programs", "seconds_of_the_host", ranks=2):
        assert queued < 0.1
        assert done >= 0.2


def test_a_link_has_a_rate(on_device: OnDevice) -> None:
    for found in on_device("collective_programs", "seconds_on_a_link", ranks=2):
        assert min(found.values()) >= 0.2, found


def test_futures(on_device: OnDevice) -> None:
    assert on_device("collective_programs", "future_of_a_work", ranks=2) == [(6.0, [])] * 2


@pytest.mark.parametrize("nodes", [(2, 2), (3, 3), (2, 2, 2)])
def test_two_stages_gather_in_place(on_device: OnDevice, nodes: tuple[int, ...]) -> None:
    ranks = sum(nodes)
    found = on_device("collective_programs", "gathered_in_place", nodes, ranks=ranks, nodes=nodes)
    assert found == [([float(rank) for rank in range(ranks)], 0)] * ranks
