# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""World-sharded strategies on nodes with several ranks: bytes between the nodes, and the order of what is gathered."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from exactness import Setting, check, train
from payload_counting import count_one_step, gathered_parameters, sent_by_nodes

from accelerate_lshdp.engine.wire.two_stage import Stages, TwoStageAllGather, TwoStageReduceScatter
from accelerate_lshdp.runtime.groups import ProcessGroups
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


TOLERANCE = 0.02
NODES = (2, 2)


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "dtype"),
    [("fsdp", 1, "fp32"), ("fsdp", 2, "bf16"), ("fsdp_offload", 1, "fp32"), ("zero2", 2, "fp32")],
)
def test_nodes_send_the_least_there_is(workers, strategy, micro_batches, dtype):
    counted = workers(4).run(count_one_step, strategy, micro_batches, dtype, 1, nodes=NODES)
    total, root = counted[0]["total"], counted[0]["root"]
    gathered = gathered_parameters(strategy, micro_batches, total, root)
    scattered = total * {"fp32": 1.0, "bf16": 0.5}[dtype]
    formula = 1 / 2 * (gathered + scattered)  # (N-1)/N of the payload of either
    assert sent_by_nodes(counted, NODES) == pytest.approx([formula] * 2, rel=TOLERANCE)
    if (strategy, micro_batches, dtype) == ("fsdp", 1, "fp32"):
        # FSDP2 on gloo: rings over all ranks, a reduce-scatter sends what an all-reduce does. The root is gathered
        # once, which is what keeps this from being exactly half.
        stock = 3 / 4 * gathered + 2 * 3 / 4 * scattered
        assert max(sent_by_nodes(counted, NODES)) <= 0.51 * stock


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_one_stage_sends_more(workers, strategy):
    """The same ranks as one node use flat collectives; counted as if they were on two nodes."""
    counted = workers(4).run(count_one_step, strategy, 1, "fp32", 1, NODES, nodes=(4,))
    total, root = counted[0]["total"], counted[0]["root"]
    formula = 3 / 4 * gathered_parameters(strategy, 1, total, root) + 2 * 1 / 2 * total
    assert sent_by_nodes(counted, NODES) == pytest.approx([formula] * 2, rel=TOLERANCE)


def stages_of(node_sizes: tuple[int, ...]) -> Stages:
    nodes, rank = Topology(dist.get_rank(), node_sizes).node_groups, dist.get_rank()
    groups = ProcessGroups()
    return Stages(groups.of_partition(nodes, rank), groups.of_partition(tuple(zip(*nodes, strict=True)), rank))


def gather_and_scatter(node_sizes: tuple[int, ...]) -> dict:
    """Both collectives on numbers of which every sum is exact, twice; the order of ranks must come out."""
    rank, world, size = dist.get_rank(), dist.get_world_size(), 5
    stages, clock = stages_of(node_sizes), WaitClock()
    gather, scatter = TwoStageAllGather(stages, clock), TwoStageReduceScatter(stages, clock)
    gathered = torch.full((world * size,), -1.0)
    mine = gathered[rank * size : (rank + 1) * size]  # in place, as FSDP2 does
    mine.copy_(torch.arange(size) + 10.0 * rank)
    gather(output_tensor=gathered, input_tensor=mine, group=dist.group.WORLD)
    gathering = clock.take()
    given = torch.arange(world * size, dtype=torch.float32) + rank / 4
    results = []
    for _ in range(2):
        result = torch.empty(size)
        scatter(output_tensor=result, input_tensor=given, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
        results.append(result.tolist())
    return {"gathered": gathered.tolist(), "scattered": results, "waits": (gathering, clock.take())}


def check_order(replies: list[dict], world: int, size: int = 5) -> None:
    total = [world * place + sum(rank / 4 for rank in range(world)) for place in range(world * size)]
    for rank, reply in enumerate(replies):
        assert reply["gathered"] == [10.0 * r + place for r in range(world) for place in range(size)]
        assert reply["scattered"] == [total[rank * size : (rank + 1) * size]] * 2
        assert min(reply["waits"]) > 0


def test_pieces_come_in_the_order_of_ranks(workers):
    check_order(workers(4).run(gather_and_scatter, NODES, nodes=NODES), 4)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(2, 2, 2), (3, 3)])
def test_pieces_come_in_the_order_of_ranks_on_oblong_clusters(workers, nodes):
    check_order(workers(6).run(gather_and_scatter, nodes, nodes=nodes), 6)


def round_on_the_wire() -> tuple[float, float]:
    """A sum inside the node that bf16 cannot hold, and one that it can."""
    scatter = TwoStageReduceScatter(stages_of(NODES), WaitClock(), dtype=torch.bfloat16)
    # On each node 256.25 + 0.75 = 257, which bf16 rounds to 256; and 257 - 1 = 256, which only rounding of the parts
    # would spoil.
    given = torch.tensor([[256.25, 257.0], [0.75, -1.0]][dist.get_rank() % 2]).repeat(4)
    result = torch.empty(2)
    scatter(output_tensor=result, input_tensor=given, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
    return tuple(result.tolist())


def test_only_sums_of_nodes_are_rounded_to_the_precision_of_the_wire(workers):
    assert workers(4).run(round_on_the_wire, nodes=NODES) == [(512.0, 512.0)] * 4


@pytest.mark.parametrize(
    "setting",
    [
        Setting("fsdp", ((2, 2), (1, 2), (3, 2), (1, 2)), NODES, frozen=("layers.0",)),
        Setting("zero2", ((2, 2), (1, 2), (3, 2), (1, 2)), NODES, model="gpt2"),
        Setting("fsdp_offload", (3, 1, 2, 2), NODES, clip_value=0.01, gradient_checkpointing=True),
    ],
    ids=str,
)
def test_equals_one_process(workers, setting):
    check(workers(4).run(train, setting, nodes=NODES), setting.dtype)


def refuse_average() -> None:
    scatter = TwoStageReduceScatter(stages_of(NODES), WaitClock())
    scatter(torch.empty(1), torch.ones(4), dist.group.WORLD, dist.ReduceOp.AVG)


def test_only_sums(workers):
    errors = workers(4).run(refuse_average, nodes=NODES, expect_failure=True)
    assert all("gradients are summed" in error.message for error in errors)
