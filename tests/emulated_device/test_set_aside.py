# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients for host memory that cannot wait for their turn where other units have collectives in the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]


def test_a_fast_rank_makes_room_on_its_device(on_device: Callable[..., list]) -> None:
    slow, fast = on_device("set_aside", "train", [8, 8], [0], ranks=2, timeout=100)
    assert max(slow["error"], fast["error"]) < 1e-12
    assert slow["races"] == fast["races"] == []
    assert fast["aside"] > 0


def test_no_rank_waits_for_one_that_has_left_out_a_block(on_device: Callable[..., list]) -> None:
    # The first rank's gradients come after it has gathered the first block, for which the second one has to come. The
    # first rank is slower: else it would hand in what it left out before the second one loses patience.
    first, second = on_device("set_aside", "train", [7, 8], [0], ranks=2, timeout=100)
    assert max(first["error"], second["error"]) < 1e-12
    assert first["races"] == second["races"] == []
    assert second["aside"] > 0


def test_gradients_that_are_not_computed_yet_do_not_wait_for_others(on_device: Callable[..., list]) -> None:
    # The script is ahead of its device by more than a rank would wait for another one, which is as far as itself.
    results = on_device("set_aside", "train_patiently", [8, 8], [0, 1], 0.5, ranks=2, timeout=100)
    assert [rank["aside"] for rank in results] == [0, 0]
