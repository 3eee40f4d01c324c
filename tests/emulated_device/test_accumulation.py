# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients of streamed units stay on the device until the last micro-batch of a step, where it has the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]
STEPS, MICRO_BATCHES = 3, 3


@pytest.mark.parametrize(
    ("nodes", "is_short"),
    [
        pytest.param((2,), False, id="fits-(2,)"),
        pytest.param((1, 1), True, id="does not fit-(1, 1)"),
        pytest.param((1, 1), False, id="fits-(1, 1)", marks=pytest.mark.slow),
        pytest.param((2,), True, id="does not fit-(2,)", marks=pytest.mark.slow),
    ],
)
def test_one_gradient_a_step_travels_where_it_fits(
    on_device: Callable[..., list], nodes: tuple[int, ...], is_short: bool
) -> None:
    for found in on_device("accumulating", "bytes_to_host", nodes, is_short, ranks=2, timeout=100):
        assert found["races"] == []
        assert found["error"] < 5e-6
        # In the first step nobody knows yet how much memory a backward takes.
        gradients = STEPS * MICRO_BATCHES if is_short else MICRO_BATCHES + (STEPS - 1)
        copied = found["counts"]["to_host_bytes"] / found["gradient_bytes"]
        assert copied == pytest.approx(gradients, abs=0.1)


@pytest.mark.parametrize(
    ("nodes", "model"),
    [
        ((1,), "OnStreams"),
        ((1, 1), "Plain"),
        pytest.param((1,), "Plain", marks=pytest.mark.slow),
        pytest.param((1, 1), "OnStreams", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bf16_has_the_bits_of_gradients_that_were_on_the_device_all_along(
    on_device: Callable[..., list], nodes: tuple[int, ...], model: str
) -> None:
    case = {"model": model, "dtype": "float32", "precision": "bf16", "nodes": nodes, "accumulation": 3}
    results = on_device("streamed_calls", "equals_resident", case, ranks=len(nodes), timeout=100)
    assert results == [True] * len(nodes)


@pytest.mark.parametrize("how", ["read", "set to zero", "clipped", "printed"])
def test_parts_of_gradients_are_not_taken_for_whole_ones(on_device: Callable[..., list], how: str) -> None:
    for said, error in on_device("accumulating", "used_between", how, (1, 1), ranks=2):
        assert "found gradients in use between two micro-batches of an optimizer step" in said
        assert error < 1e-12
    # One process alone has all that there is.
    assert on_device("accumulating", "used_between", how, (1,)) == [("", pytest.approx(0, abs=1e-12))]


def test_a_step_before_the_last_micro_batch(on_device: Callable[..., list]) -> None:
    for said, _ in on_device("accumulating", "stepped_between", (1, 1), ranks=2):
        assert "found gradients in use between two micro-batches of an optimizer step" in said
    assert on_device("accumulating", "stepped_between", (1,)) == [("", pytest.approx(0, abs=1e-12))]


def test_steps_are_late_where_gradients_were_kept(on_device: Callable[..., list]) -> None:
    assert on_device("accumulating", "steps_late") == [[True] * 4]


def test_two_models_share_the_memory_that_is_left(on_device: Callable[..., list]) -> None:
    ((kept, error),) = on_device("accumulating", "short_of_memory", "two models")
    assert error < 1e-12
    assert sorted(kept[-1]) == [False, True]


def test_nothing_is_kept_after_a_backward_has_failed(on_device: Callable[..., list]) -> None:
    ((kept, error),) = on_device("accumulating", "short_of_memory", "failure")
    assert error < 1e-12
    assert kept == [[True], [False], [False]]


@pytest.mark.parametrize("blocks", ["replicate", "world"])
def test_kept_when_the_moments_of_blocks_on_the_device_are_there(on_device: Callable[..., list], blocks: str) -> None:
    """The first optimizer step makes them, in memory that is free until then. They end the second backward."""
    for kept in on_device("accumulating", "kept_beside", blocks, (1, 1), ranks=2):
        assert kept == [False, True, True]


def test_parts_of_gradients_count_as_gradients(on_device: Callable[..., list]) -> None:
    assert on_device("accumulating", "held_between") == [[True, True, False, False]]


@pytest.mark.parametrize("nodes", [(1,), (1, 1)], ids=str)
def test_parts_of_gradients_are_dropped_when_a_model_is_closed(
    on_device: Callable[..., list], nodes: tuple[int, ...]
) -> None:
    for are_dropped, *errors in on_device("accumulating", "closed_between", nodes, ranks=len(nodes)):
        assert are_dropped is (len(nodes) > 1)  # one process alone has all that there is
        assert max(errors) < 1e-12


def test_parts_of_gradients_are_dropped_when_a_backward_fails(on_device: Callable[..., list]) -> None:
    assert max(on_device("accumulating", "failed_between")) < 1e-12


def test_a_device_without_the_memory_says_so_once(on_device: Callable[..., list]) -> None:
    (said,) = on_device("accumulating", "warned")
    assert said.count("gradients of every micro-batch are copied to the host") == 1
