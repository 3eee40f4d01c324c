# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Embeddings and output heads that are streamed in slices: the training of one process, and less of them at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from test_streamed import SLOW


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]

MODELS = (
    "Plain",
    "Tied",
    "OwnLoss",
    "OwnLossApart",
    "TwoHeads",
    "TiedByHand",
    "Projected",
    "SelfConditioned",
    "UsedTwice",
    "Padded",
    "FrozenEnds",
    "FrozenBelow",
    "Recomputed",
    "Unused",
    "OnStreams",
    "SideEnds",
)


def check(on_device: Callable[..., list], tolerance: float = 1e-12, **options: Any) -> list[dict[str, Any]]:
    options = {"slices": 3, "strategy": "osdp", **options}
    results = on_device("streamed_calls", "train", options, ranks=sum(options.get("nodes", (2,))), timeout=100)
    for found in results:
        assert found["races"] == []
        assert found["error"] < tolerance
        assert found["counts"]["items"] == 0
    return results


@pytest.mark.parametrize("model", MODELS)
def test_models_train_as_in_one_process(on_device: Callable[..., list], model: str) -> None:
    check(on_device, model=model, delays=SLOW["copies"])


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("nodes", [(1,), (1, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("model", ["OwnLoss", "OwnLossApart"])
def test_nodes_train_as_one_process(
    on_device: Callable[..., list], model: str, nodes: tuple[int, ...], slow: str
) -> None:
    check(on_device, model=model, nodes=nodes, delays=SLOW[slow])


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 3},
        pytest.param({"accumulation": 3, "drops": True}, marks=pytest.mark.slow),
        pytest.param({"accumulation": 3, "model": "SideEnds"}, marks=pytest.mark.slow),
        {"pairs": True},
        pytest.param({"pairs": True, "model": "OwnLossApart"}, marks=pytest.mark.slow),
        {"evaluates": True},
        {"slices": 13},
        {"dtype": "float32", "model": "Tied"},
        {"dtype": "float32", "precision": "bf16"},
        {"nodes": (1, 1), "devices": ("emulated", "cpu"), "accumulation": 2},
    ],
    ids=str,
)
def test_ways_to_train(on_device: Callable[..., list], options: dict[str, Any]) -> None:
    tolerance = 1e-12
    if options.get("dtype") is not None:
        tolerance = 5e-6 if options.get("precision") is None else 0.05
    check(on_device, tolerance, **{"model": "OwnLoss", "delays": SLOW["copies"], **options})


@pytest.mark.parametrize("model", ["OwnLoss", "Plain"])
def test_late_steps_have_the_same_bits(on_device: Callable[..., list], model: str) -> None:
    case = {"model": model, "slices": 3, "delays": SLOW["copies"]}
    for found in on_device("late_steps", "has_the_same_bits", case, "adamw fused", ranks=2):
        assert found == {"same": True, "late": [True] * 3, "races": []}


@pytest.mark.parametrize("model", ["OwnLoss", "OwnLossApart", "Plain", "Tied"])
def test_a_graph_that_is_kept_has_a_second_backward(on_device: Callable[..., list], model: str) -> None:
    assert max(on_device("streamed_training", "backward_twice", model, 3)) < 1e-12


@pytest.mark.parametrize("model", ["Tied", "Plain"], ids=["without the head", "with another product of it"])
def test_a_second_backward_may_be_of_another_loss(on_device: Callable[..., list], model: str) -> None:
    assert max(on_device("streamed_training", "two_losses_of_one_graph", 3, model)) < 1e-12


def test_gradients_go_to_the_host_beside_the_backward(on_device: Callable[..., list]) -> None:
    # A product of the rest before all blocks has its gradient last: blocks do not wait for it.
    (handed_in,) = on_device("streamed_training", "handed_in_before_the_embedding", "Projected", 3)
    assert handed_in >= 3


@pytest.mark.parametrize("tied", [True, False])
def test_the_device_has_parts_of_a_large_vocabulary(on_device: Callable[..., list], tied: bool) -> None:
    whole, sliced = (on_device("streamed_limits", "peak_of_a_vocabulary", tied, slices)[0] for slices in (1, 16))
    # The weights, and their gradients.
    assert whole["peak"] > 3 * whole["weight"]
    # Two slices, and gradients of slices: one that is computed, others that wait or are copied.
    assert sliced["peak"] < 6 * whole["weight"] / 16
    assert sliced["pinned"] <= whole["pinned"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("replaced", "found another tensor in the place of weight of Linear"),
        ("hook", "found hooks of register_hook on head.weight, which is in slices"),
        ("post hook", "found hooks of register_post_accumulate_grad_hook"),
        ("other operator", "found head.weight, which is in slices, in sum"),
        ("two losses", "found another gradient of head.weight, which is in slices, after those"),
        ("collectives", 'found slices of what is in no unit \\(""\\) in store "host".* Use .*auto'),
        ("stale", "found head.weight, which is in slices, changed after a forward|through a forward of"),
    ],
)
def test_what_cannot_be_right_is_said(on_device: Callable[..., list], how: str, message: str) -> None:
    (found,) = on_device("streamed_training", "misused", how, 3)
    assert re.search(message, found), found


def test_an_unknown_index_shows_as_nan(on_device: Callable[..., list]) -> None:
    # As nothing waits for the device; and its gradient goes nowhere.
    assert on_device("streamed_training", "embeds_unknown_index", 3) == [([False, True], True)]


@pytest.mark.parametrize("slices", [1, 3])
def test_what_is_on_the_host_may_all_be_frozen(on_device: Callable[..., list], slices: int) -> None:
    """As where adapters are trained (LoRA)."""
    check(on_device, model="FrozenRest", slices=slices, blocks="world", delays=SLOW["copies"])


def test_logits_are_read_on_one_rank_alone(on_device: Callable[..., list]) -> None:
    assert max(on_device("streamed_training", "reads_logits_on_one_rank", ranks=2)) < 1e-12
