"""Invariant 6: what travels in a step is what the strategies' table says, with and without accumulation."""

from __future__ import annotations

import pytest
from payload_counting import count_one_step, gathered_parameters


TOLERANCE = 0.02  # the ranks also tell each other a few numbers in each step


def expected(strategy: str, micro: int, total: int, root: int, local: int, width: float) -> dict[str, float]:
    """Payload of the collectives of one step: `total` bytes of parameters, `local` ranks a node."""
    if strategy == "ddp":
        return {"all_reduce": total * width}
    gathered = gathered_parameters(strategy, micro, total, root)
    if strategy in ("fsdp", "fsdp_offload", "zero2"):
        return {"all_gather": gathered, "all_to_all": total * width}
    inside = {"all_gather": gathered, "all_to_all": micro * total} if local > 1 else {}
    return {"all_reduce": total / local * width, **inside}


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
        ("fsdp", (1, 1), 1, "fp32", 1),
        ("fsdp_offload", (1, 1), 2, "fp32", 1),
        ("fsdp", (4,), 1, "bf16", 1),
    ],
)
def test_bytes_of_a_step(workers, strategy, nodes, micro_batches, dtype, own):
    width = {"fp32": 1.0, "bf16": 0.5}[dtype]
    for counted in workers(sum(nodes)).run(count_one_step, strategy, micro_batches, dtype, own, nodes=nodes):
        formula = expected(strategy, micro_batches * own, counted["total"], counted["root"], nodes[0], width)
        allowed = TOLERANCE * sum(formula.values())
        for kind in formula.keys() | counted["payload"].keys():
            sent = counted["payload"].get(kind, 0)
            assert abs(sent - formula.get(kind, 0)) <= allowed, f"{kind}: sent {sent}, expected {formula.get(kind, 0)}"
