# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 6: what travels in a step is what the strategies' table says, with and without accumulation."""

from __future__ import annotations

from collections import Counter

import pytest
from payload_counting import count_one_step, gathered_parameters, sent_by_nodes

from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


TOLERANCE = 0.02  # the ranks also tell each other a few numbers in each step


def expected(strategy: str, micro: int, total: int, root: int, dtype: str) -> dict[str, float]:
    """Payload of the collectives of one step: `total` bytes of parameters, of which `root` are in no unit.

    Of one rank; for strategies with one copy a node of all its ranks, which share the memory and the work on a CPU.
    """
    sent = total * WIRE_FORMATS[dtype].wire_share
    if Strategy(strategy).is_world_sharded:
        return {"all_gather": gathered_parameters(strategy, micro, total, root), "all_to_all": sent}
    return {"all_reduce": sent} if WIRE_FORMATS[dtype].is_added else {"all_to_all": sent, "all_gather": sent}


@pytest.mark.parametrize(
    ("strategy", "nodes", "micro_batches", "dtype", "own"),
    [
        ("ddp", (1, 1), 1, "fp32", 1),
        ("ddp", (1, 1), 3, "fp32", 2),
        ("ddp", (1, 1), 1, "bf16", 1),
        ("lsdp", (1, 1), 1, "fp32", 1),
        ("lsdp", (1, 1), 2, "bf16", 2),
        ("lsdp", (2, 2), 1, "fp32", 1),
        ("lsdp", (2, 2), 3, "fp32", 1),
        ("group_sharding", (2, 2), 2, "bf16", 1),
        ("zero2", (1, 1), 1, "fp32", 1),
        ("zero2", (1, 1), 3, "bf16", 2),
        ("zero1", (1, 1), 2, "fp32", 1),
        ("fsdp", (1, 1), 1, "fp32", 1),
        ("fsdp_offload", (1, 1), 2, "fp32", 1),
        ("fsdp", (4,), 1, "bf16", 1),
    ],
)
def test_bytes_of_a_step(workers, strategy, nodes, micro_batches, dtype, own):
    counted = workers(sum(nodes)).run(count_one_step, strategy, micro_batches, dtype, own, nodes=nodes)
    formula = expected(strategy, micro_batches * own, counted[0]["total"], counted[0]["root"], dtype)
    allowed = TOLERANCE * sum(formula.values())
    together = nodes[0] if Strategy(strategy).is_node_sharded else 1
    for first in range(0, sum(nodes), together):
        payload = sum((Counter(rank["payload"]) for rank in counted[first : first + together]), Counter())
        for kind in formula.keys() | payload.keys():
            assert payload[kind] == pytest.approx(formula.get(kind, 0), abs=allowed), kind


@pytest.mark.parametrize(("strategy", "micro_batches", "dtype"), [("lsdp", 3, "fp32"), ("group_sharding", 2, "bf16")])
def test_bytes_of_a_step_without_shared_memory(workers, strategy, micro_batches, dtype):
    """As on GPUs: the ranks of a node gather and scatter in every micro-batch, and each sums its shard over nodes."""
    settings = (strategy, micro_batches, dtype, 1, None, "collectives")
    for counted in workers(4).run(count_one_step, *settings, nodes=(2, 2)):
        total = counted["total"]
        formula = {
            "all_reduce": total / 2 * {"fp32": 1.0, "bf16": 0.5}[dtype],
            "all_gather": gathered_parameters(strategy, micro_batches, total, counted["root"]),
            "all_to_all": micro_batches * total,
        }
        assert counted["payload"] == pytest.approx(formula, abs=TOLERANCE * sum(formula.values()))


@pytest.mark.parametrize(
    ("strategy", "nodes", "intra_node"),
    [
        ("ddp", (2, 2), "auto"),
        ("ddp", (1, 2), "auto"),
        ("ddp", (2, 2), "collectives"),
        ("ddp", (1, 2), "collectives"),
        ("group_sharding", (1, 2), "collectives"),  # as on GPUs: one rank a shard group
    ],
)
def test_whole_copies_send_between_nodes_what_one_copy_a_node_sends(workers, strategy, nodes, intra_node):
    """2 (N-1)/N of the gradients for N nodes, not ranks: what a node's ranks have is summed inside the node first."""
    whole = workers(sum(nodes)).run(count_one_step, strategy, 2, "fp32", 1, None, intra_node, nodes=nodes)
    shared = workers(sum(nodes)).run(count_one_step, "lsdp", 2, "fp32", 1, nodes=nodes)
    assert sent_by_nodes(whole, nodes) == pytest.approx([whole[0]["total"]] * 2, rel=TOLERANCE)
    assert sent_by_nodes(whole, nodes) == pytest.approx(sent_by_nodes(shared, nodes), rel=TOLERANCE)


def test_whole_copies_on_one_node_send_nothing_through_sockets(workers):
    for counted in workers(2).run(count_one_step, "ddp", 1, "fp32", 1, nodes=(2,)):
        assert sum(counted["payload"].values()) < TOLERANCE * counted["total"]
