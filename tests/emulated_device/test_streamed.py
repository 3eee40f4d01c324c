# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Parameters streamed from the memory of the node: the training of one process, and no race, however slow what is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]

SLOW = {
    "copies": (("copy_delay", 0.004), ("to_device", 1e8), ("to_host", 1e8)),
    "compute": (("compute_delay", 0.0005),),
}
MODELS = (
    "Plain",
    "Tied",
    "LowRank",
    "FrozenBelow",
    "FrozenBetween",
    "Recomputed",
    "RecomputedReentrant",
    "RecomputedInside",
    "Repeated",
    "LookingBack",
    "InPlace",
    "Objects",
    "Unused",
    "HiddenLoss",
    "LookedInto",
    "Skipping",
    "OnStreams",
)


def check(on_device: Callable[..., list], tolerance: float = 1e-12, **options: Any) -> list[dict[str, Any]]:
    ranks = sum(options.get("nodes", (2,)))
    results = on_device("streamed_calls", "train", options, ranks=ranks, timeout=100)
    for found in results:
        assert found["races"] == []
        assert found["error"] < tolerance
        assert found["counts"]["items"] == 0
    return results


@pytest.mark.parametrize("model", MODELS)
def test_models_train_as_in_one_process(on_device: Callable[..., list], model: str) -> None:
    check(on_device, model=model, delays=SLOW["copies"])


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("nodes", [(1,), (1, 1), (2,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_nodes_train_as_one_process(on_device: Callable[..., list], nodes: tuple[int, ...], slow: str) -> None:
    check(on_device, nodes=nodes, delays=SLOW[slow])


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 3},
        {"accumulation": 3, "model": "OnStreams"},
        {"accumulation": 3, "drops": True},
        {"pairs": True},
        {"ahead": 2},
        {"dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("slow", SLOW)
def test_ways_to_train(on_device: Callable[..., list], options: dict[str, Any], slow: str) -> None:
    check(on_device, 1e-12 if options.get("dtype") is None else 5e-6, delays=SLOW[slow], **options)


@pytest.mark.parametrize("nodes", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize("model", ["Plain", "Recomputed"])
def test_bf16_has_the_bits_of_parameters_on_the_device(
    on_device: Callable[..., list], model: str, nodes: tuple[int, ...]
) -> None:
    # Nodes of one rank: norms for clipping are added in another order where it is shards that are on the device.
    case = {"model": model, "dtype": "float32", "precision": "bf16", "nodes": nodes, "delays": SLOW["copies"]}
    results = on_device("streamed_calls", "equals_resident", case, ranks=len(nodes), timeout=100)
    assert results == [True] * len(nodes)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_bytes_of_a_step(on_device: Callable[..., list], precision: str) -> None:
    (found, _) = check(on_device, 1.0, nodes=(1, 1), dtype="float32", precision=precision)
    steps, counts = 3, found["counts"]
    # Forward and backward; the rest of the model stays. Batches are small beside it.
    assert counts["to_device_bytes"] <= steps * (2 * found["bytes"] + 4096)
    assert counts["to_host_bytes"] <= steps * found["gradient_bytes"] + 4096
    assert counts["pageable_copies"] <= 2 * steps  # the batches
    # At most one for each gradient (one a bucket, and these are small), and those of batches and of the end.
    assert counts["host_synchronisations"] <= steps * (found["gradients"] + 4) + 4


def test_the_thread_of_a_node_has_groups_of_its_own(on_device: Callable[..., list]) -> None:
    assert on_device("streamed_training", "shares_groups_with_the_world", ranks=2) == [False, False]


@pytest.mark.parametrize("closes", [False, True], ids=["dropped", "closed"])
def test_memory_is_registered_as_long_as_it_is_there(on_device: Callable[..., list], closes: bool) -> None:
    for before, placed, after in on_device("streamed_training", "registered_after", closes, ranks=2):
        assert placed > before == after


def test_a_step_of_another_model_changes_nothing_here(on_device: Callable[..., list]) -> None:
    assert max(on_device("streamed_training", "step_of_another_model")) < 1e-12


def test_hooks_on_parameters_get_their_gradients(on_device: Callable[..., list]) -> None:
    ((before, after, other),) = on_device("streamed_training", "hooked_gradients")
    assert before == after == 0 < other


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("functional_call", "found another tensor in the place of"),
        ("replaced", "found another tensor in the place of weight of Linear"),
        ("post hook", "found hooks of register_post_accumulate_grad_hook"),
        ("penalty", "found a gradient for a parameter .* in host memory"),
        ("changed", "found parameters of Block that its forward has changed in place"),
        ("stale", "found a backward through a forward of"),
    ],
)
def test_what_cannot_be_right_is_said(on_device: Callable[..., list], how: str, message: str) -> None:
    (found,) = on_device("streamed_training", "misused", how)
    assert re.search(message, found), found


def test_a_state_after_an_interrupt_is_the_one_in_host_memory(on_device: Callable[..., list]) -> None:
    assert on_device("streamed_training", "kept_after_interrupt") == [["torch.float32"]]


def test_blocks_wait_for_a_backward_that_cannot_be_seen(on_device: Callable[..., list]) -> None:
    assert max(on_device("streamed_training", "between_forward_and_backward")) < 1e-12


@pytest.mark.parametrize("model", ["Plain", "LowRank", "Recomputed"])
def test_a_graph_that_is_kept_has_a_second_backward(on_device: Callable[..., list], model: str) -> None:
    assert max(on_device("streamed_training", "backward_twice", model)) < 1e-12


def test_gradients_that_are_larger_than_their_place_come_in_pieces(on_device: Callable[..., list]) -> None:
    for found in on_device("streamed_training", "train_in_pieces", ranks=2):
        assert found["races"] == []
        assert found["error"] < 1e-12
