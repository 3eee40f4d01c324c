# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory of the strategies: the numbers of the ZeRO paper, and what each strategy keeps where."""

from __future__ import annotations

import pytest

from accelerate_lshdp.planning.cost.memory import STATE_BYTES, ZERO_BYTES, ModelCounts, rank_memory


def one(strategy: str, counts: ModelCounts, nodes: tuple[int, ...], **options):
    """Of a rank of the first node."""
    return rank_memory(strategy, counts, nodes, **options)[0]


def test_numbers_of_the_zero_paper() -> None:
    # Figure 1: 7.5 B parameters, 64 devices, mixed precision with Adam: 120, 16.6 and 1.9 GB.
    counts = ModelCounts(7_500_000_000, 7_500_000_000, ())
    options = {"nodes": (8,) * 8, "state_bytes": ZERO_BYTES}
    assert one("ddp", counts, **options).states / 1e9 == pytest.approx(120)
    zero2 = one("zero2", counts, **options)
    whole_parameters = counts.parameters * ZERO_BYTES.gathered
    assert (zero2.gradients + zero2.optimizer + whole_parameters) / 1e9 == pytest.approx(16.6, abs=0.05)
    # What is carried out as zero1 needs what zero2 does: less than ZeRO-1's 31.4 GB, with whole gradients.
    assert one("zero1", counts, **options) == zero2
    whole = zero2.optimizer + counts.parameters * (ZERO_BYTES.parameter + ZERO_BYTES.gradient)
    assert whole / 1e9 == pytest.approx(31.4, abs=0.05)
    assert one("fsdp", counts, **options).states / 1e9 == pytest.approx(1.9, abs=0.05)
    # The same in fp32: 4 + 4 + 8 bytes a parameter.
    assert one("ddp", counts, (8,) * 8).states == 16 * counts.parameters


COUNTS = ModelCounts(1000, 900, (300, 200, 400))  # 100 in the root


def test_who_shares_a_copy() -> None:
    states = {
        strategy: [rank.states for rank in rank_memory(strategy, COUNTS, nodes)]
        for strategy, nodes in {"ddp": (2, 2), "lsdp": (2, 2), "fsdp": (2, 2), "group_sharding": (1, 2)}.items()
    }
    whole = 1000 * 4 + 900 * (4 + 8)
    assert states["ddp"] == [whole, whole]
    assert states["lsdp"] == [whole / 2, whole / 2]
    assert states["fsdp"] == [whole / 4, whole / 4]
    # Nodes with different numbers of ranks: every rank has a copy.
    assert states["group_sharding"] == [whole, whole]


def test_what_is_gathered_beside_it() -> None:
    # The root and the two largest units in fp32, and the gradients of the largest and of the root.
    assert one("fsdp", COUNTS, (2, 2)).gathered == 4 * (100 + 400 + 300) + 4 * (400 + 100)
    assert one("zero2", COUNTS, (2, 2)).gathered == 4 * 1000 + 4 * (400 + 100)
    assert one("ddp", COUNTS, (2, 2)).gathered == 0
    # Whole gradients are kept while micro-batches are accumulated, but not inside a node, where they are reduced.
    assert one("fsdp", COUNTS, (2, 2), accumulates=True).gathered == 4 * (100 + 400 + 300) + 4 * (900 + 100)
    assert one("lsdp", COUNTS, (2, 2), accumulates=True).gathered == one("lsdp", COUNTS, (2, 2)).gathered
    half = STATE_BYTES["bf16"]
    assert one("fsdp", COUNTS, (2, 2), state_bytes=half).gathered == one("fsdp", COUNTS, (2, 2)).gathered / 2
    assert one("ddp", COUNTS, (2, 2), state_bytes=half).gathered == 2 * 1000  # autocast's copy


def test_where_it_is() -> None:
    lsdp = one("lsdp", COUNTS, (2, 2), activation_bytes=5000.0)
    assert lsdp.host_bytes == lsdp.states
    assert lsdp.device_bytes == lsdp.gathered + 5000
    sharded = one("group_sharding", COUNTS, (2, 2), activation_bytes=5000.0)
    assert (sharded.host_bytes, sharded.device_bytes) == (0, lsdp.total_bytes)


def test_formats_keep_errors_and_copies() -> None:
    # Between nodes, of the rank's own part of the gradients: 900 * 4 bytes by two ranks.
    extra = {
        dtype: one("lsdp", COUNTS, (2, 2), communication_dtype=dtype).total_bytes
        - one("lsdp", COUNTS, (2, 2)).total_bytes
        for dtype in ("bf16", "int8", "powersgd")
    }
    assert extra["bf16"] == 900  # a copy in half the bytes
    assert extra["int8"] == 1800 + 900  # errors in fp32, and messages of two bytes an element
    assert extra["powersgd"] >= 1800
    assert one("lsdp", COUNTS, (2,), communication_dtype="int8") == one("lsdp", COUNTS, (2,))
    assert one("torch_ddp", COUNTS, (1, 1)).total_bytes == one("ddp", COUNTS, (1, 1)).total_bytes + 3600
    with pytest.raises(ValueError, match="expected one of fp32"):
        one("lsdp", COUNTS, (2, 2), communication_dtype="fp8")
