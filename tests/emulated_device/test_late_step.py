# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Steps that the host makes during the next forward: the same bits as at once, whatever a script does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]
LATE = ("adamw", "adamw fused", "adamw foreach", "adam", "sgd", "sgd plain", "groups")


@pytest.mark.parametrize("optimizer", LATE)
def test_the_bits_of_a_step_that_is_made_at_once(on_device: Callable[..., list], optimizer: str) -> None:
    for found in on_device("late_steps", "has_the_same_bits", {}, optimizer, ranks=2):
        assert found == {"same": True, "late": [True] * 3, "races": []}


@pytest.mark.parametrize("optimizer", ["rmsprop", "tensor"])
def test_other_optimizers_step_at_once(on_device: Callable[..., list], optimizer: str) -> None:
    for found in on_device("late_steps", "has_the_same_bits", {}, optimizer, ranks=2):
        assert found == {"same": True, "late": [False] * 3, "races": []}


@pytest.mark.parametrize(
    "case",
    [
        {"precision": "bf16", "dtype": "float32", "nodes": (1, 1)},
        {"model": "Tied", "ahead": 2, "delays": (("copy_delay", 0.004),)},
        pytest.param({"model": "Repeated", "nodes": (1, 2)}, marks=pytest.mark.slow),
        pytest.param({"model": "FrozenBetween", "delays": (("compute_delay", 0.0005),)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_models_and_nodes(on_device: Callable[..., list], case: dict[str, Any]) -> None:
    ranks = sum(case.get("nodes", (2,)))
    for found in on_device("late_steps", "has_the_same_bits", case, "adamw fused", ranks=ranks):
        assert found == {"same": True, "late": [True] * 3, "races": []}


def test_a_forward_begins_before_the_step_is_made(on_device: Callable[..., list]) -> None:
    assert on_device("late_steps", "overlaps") == [True]


def test_who_reads_waits(on_device: Callable[..., list]) -> None:
    assert on_device("late_steps", "readers_wait", ranks=2, timeout=100) == [[], []]


def test_what_is_changed_after_a_step_does_not_change_the_step(on_device: Callable[..., list]) -> None:
    assert on_device("late_steps", "changes_come_after_the_step", ranks=2) == [[], []]


@pytest.mark.parametrize("way", ["data", "numpy", "view"])
def test_views_of_parameters_have_the_new_values(on_device: Callable[..., list], way: str) -> None:
    assert on_device("late_steps", "seen_by_aliases", way, True) == [{"late": False, "right": True}]
    # What they would see otherwise.
    assert on_device("late_steps", "seen_by_aliases", way, False) == [{"late": True, "right": False}]


def test_a_gradient_that_the_script_holds_is_stepped_with_at_once(on_device: Callable[..., list]) -> None:
    assert on_device("late_steps", "held_gradients_are_kept") == [False]


def test_a_step_that_fails_is_reported_on_all_ranks(on_device: Callable[..., list]) -> None:
    other, failed = on_device("late_steps", "failures", "late", ranks=2)
    assert "no memory for this; goes on" in failed
    assert "the optimizer's step of local rank 1 of this node failed" in other and "; goes on" in other


def test_an_optimizer_that_fails_is_reported_on_all_ranks(on_device: Callable[..., list]) -> None:
    other, failed = on_device("late_steps", "failures", "optimizer", ranks=2)
    assert failed == "no memory for this; goes on"
    assert "the optimizer's step of local rank 1 of this node failed" in other and "; goes on" in other


def test_several_models(on_device: Callable[..., list]) -> None:
    assert on_device("late_steps", "gan") == [{"same": True, "states": ["defaultdict"] * 3}]
