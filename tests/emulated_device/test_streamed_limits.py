# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What streaming is for: models that are larger than the device, and one copy of them on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accelerate_lshdp.documents.bucket_sizes import WAITING_BUCKETS


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]
#: Where the peak of two ranks is that of whole parameters. One rank alone: it cannot wait for another that has failed.
DEPTH = 16
WIDTH = 128  # of `streamed_limits.Deep`, which imports the device


def peak(on_device: Callable[..., list], strategy: str, depth: int = DEPTH, limit: int | None = None) -> int | str:
    (found,) = on_device("streamed_limits", "trained", strategy, depth, "no", limit)
    return found if isinstance(found, str) else found["peak"]


def test_a_model_that_is_larger_than_the_device_is_streamed(on_device: Callable[..., list]) -> None:
    limit = 6 * peak(on_device, "group_sharding") // 10
    assert peak(on_device, "ddp", limit=limit) == "OutOfMemoryError"
    assert peak(on_device, "group_sharding", limit=limit) == "OutOfMemoryError"
    assert peak(on_device, "lsdp", limit=limit) <= limit


@pytest.mark.parametrize("depth", [8, 16])
def test_the_device_needs_as_much_for_any_number_of_blocks(on_device: Callable[..., list], depth: int) -> None:
    block = 2 * (WIDTH * WIDTH + WIDTH) * 4
    # The one that computes, the next one, and gradients that wait for those before them, beside the one that is being
    # copied and the one that is being computed: of a weight each.
    parameters = 2 * block + (WAITING_BUCKETS + 2) * block // 2
    # The input of each block, and what is computed in one of them.
    activations = (depth + 20) * 2 * WIDTH * 4
    assert peak(on_device, "lsdp", depth) <= parameters + activations + 512 * 64


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_has_one_copy_for_all_ranks(on_device: Callable[..., list], ranks: int) -> None:
    results = on_device("streamed_limits", "trained", "lsdp", DEPTH, "bf16", None, ranks=ranks)
    parameters = results[0]["parameters"]
    # Masters, gradients, and a copy in bf16, mapped by all; and the moments of AdamW, by the rank that steps them.
    assert all(found["pinned"] == results[0]["pinned"] for found in results)
    assert results[0]["pinned"] + sum(found["states"] for found in results) <= 1.05 * 18 * parameters
