# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory of the strategies: the numbers of the ZeRO paper, and what each strategy keeps where."""

from __future__ import annotations

import pytest

from accelerate_lshdp.documents.host_memory import MOST_FREE_IN_HEAP, free_in_heap
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
    fsdp, zero2 = one("fsdp", COUNTS, (2, 2)), one("zero2", COUNTS, (2, 2))
    assert (fsdp.gathered, fsdp.unreduced) == (4 * (100 + 400 + 300), 4 * (400 + 100))
    assert (zero2.gathered, zero2.unreduced) == (4 * 1000, 4 * (400 + 100))
    assert (one("ddp", COUNTS, (2, 2)).gathered, one("ddp", COUNTS, (2, 2)).unreduced) == (0, 0)
    # Whole gradients are kept while micro-batches are accumulated, but not inside a node, where they are reduced.
    assert one("fsdp", COUNTS, (2, 2), accumulates=True).unreduced == 4 * (900 + 100)
    assert one("lsdp", COUNTS, (2, 2), accumulates=True).unreduced == one("lsdp", COUNTS, (2, 2)).unreduced
    half = STATE_BYTES["bf16"]
    assert one("fsdp", COUNTS, (2, 2), state_bytes=half).gathered == fsdp.gathered / 2
    assert one("ddp", COUNTS, (2, 2), state_bytes=half).gathered == 2 * 1000  # autocast's copy


def test_where_it_is() -> None:
    lsdp = one("lsdp", COUNTS, (2, 2), activation_bytes=5000.0)
    assert lsdp.communication == 4 * 900  # a bucket of this rank's own, here of all gradients
    assert lsdp.host_bytes == lsdp.states + lsdp.communication
    assert lsdp.device_bytes == lsdp.gathered + lsdp.unreduced + 5000
    sharded = one("group_sharding", COUNTS, (2, 2), activation_bytes=5000.0)
    assert sharded.host_bytes == 0
    assert sharded.device_bytes == sharded.states + sharded.gathered + sharded.unreduced + 5000
    # Gradients wait in buckets to be copied, and here they are one.
    assert lsdp.unreduced == sharded.unreduced + 4 * 900


def test_nodes_have_one_copy_in_host_memory_whatever_their_ranks() -> None:
    first, second = rank_memory("lsdp", COUNTS, (1, 2), state_bytes=STATE_BYTES["bf16"])
    # Beside the parameters, a copy in bf16.
    assert first.parameters == 2 * second.parameters == (4 + 2) * 1000
    assert first.optimizer == 2 * second.optimizer == 8 * 900
    assert first.gathered == second.gathered


def test_formats_keep_errors_and_copies() -> None:
    # Between nodes, of the rank's own part of the gradients: 900 * 4 bytes by two ranks.
    extra = {
        dtype: one("lsdp", COUNTS, (2, 2), communication_dtype=dtype).total_bytes
        - one("lsdp", COUNTS, (2, 2)).total_bytes
        for dtype in ("bf16", "int8", "powersgd")
    }
    assert extra["bf16"] == 900  # a copy in half the bytes
    # Errors in fp32 and two messages of a byte an element and a scale a block; of the half that a rank owns, once.
    assert extra["int8"] == pytest.approx(1800 + 900 * (1 + 1 / 256) + 900 + 225 * (1 + 1 / 256))
    assert extra["powersgd"] >= 1800
    assert one("lsdp", COUNTS, (2,), communication_dtype="int8") == one("lsdp", COUNTS, (2,))
    assert one("torch_ddp", COUNTS, (1, 1)).total_bytes == one("ddp", COUNTS, (1, 1)).total_bytes + 3600
    with pytest.raises(ValueError, match="expected one of fp32"):
        one("lsdp", COUNTS, (2, 2), communication_dtype="fp8")


def test_hosts_that_compute_map_one_copy_a_node() -> None:
    counts = ModelCounts(30_000_000, 30_000_000, (2_000_000,) * 15)
    alone, pair = rank_memory("lsdp", counts, (1, 2), activation_bytes=5e7, computes_on_hosts=True)
    assert alone.states == 2 * pair.states == 16 * counts.parameters
    assert alone.gathered == pair.gathered == 0
    # Four buckets of 1/24 of the gradients wait for the ranks before this one. Nobody is before one that is alone,
    # which has the gradient that autograd made last, and a message that it receives and one that it sends.
    assert (alone.unreduced, pair.unreduced) == (3 * (4 * counts.trainable // 24), 4 * (4 * counts.trainable // 24))
    assert pair.heap == free_in_heap(4 * counts.parameters) + 5e7 / 8  # with holes between activations
    assert free_in_heap(4 * counts.parameters) == free_in_heap(16 * 2**20) == MOST_FREE_IN_HEAP + 16 * 2**20
    assert free_in_heap(1000) == MOST_FREE_IN_HEAP + 1000
    assert pair.total_bytes == pair.states + pair.unreduced + 5e7 + pair.heap
    # A large world's shards are small beside the model that the script has made.
    counts = ModelCounts(600_000_000, 600_000_000, (2_000_000,) * 300)
    (world,) = rank_memory("fsdp", counts, (32,), computes_on_hosts=True)
    assert world.total_bytes == world.starting == 4 * counts.parameters * (1 + 1 / 32)


def test_on_hosts_messages_count_and_gathered_copies_go() -> None:
    fsdp = one("fsdp", COUNTS, (2, 2), computes_on_hosts=True)
    assert fsdp.unreduced == 4 * (2 * 400 + 100)
    # All units (0.9 of the model) are gathered when no gradient is there, and none when all are: half counts twice.
    zero2 = one("zero2", COUNTS, (2, 2), computes_on_hosts=True)
    assert (zero2.gathered, zero2.unreduced) == (4 * 1000 - 0.45 * zero2.gradients, fsdp.unreduced)
    # To kept gradients autograd adds new ones of one parameter at a time, of half a unit at most.
    kept = one("fsdp", COUNTS, (2, 2), accumulates=True, computes_on_hosts=True)
    assert kept.unreduced == 4 * (900 + 400 + 200 + 100)
    offloaded = one("fsdp_offload", COUNTS, (2, 2), computes_on_hosts=True)
    assert offloaded.unreduced == fsdp.unreduced
