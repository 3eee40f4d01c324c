# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The bytes that each rank of a training should take, as the package predicts them, and the sizes that this needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from memory_runs.model import Transformer
from torch._subclasses.fake_tensor import FakeTensorMode

from accelerate_lshdp import Plan
from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.engine.unit_measurement import saved_bytes
from accelerate_lshdp.estimation.model_measurement import output_loss
from accelerate_lshdp.planning.cost.memory import ModelCounts, RankMemory, rank_memory
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement, uniform_placements
from accelerate_lshdp.planning.placement.problem import PlacementProblem
from accelerate_lshdp.planning.placement.result import units_of
from accelerate_lshdp.planning.placement.search import solve


_LARGEST = 64


def uniform(sizes: Mapping[str, Any], plan: Plan, nodes: Sequence[int]) -> list[RankMemory]:
    """The memory of each rank under a plan whose units are all kept alike, by terms."""
    model = model_sizes(**sizes)
    everything = sum(unit.parameters for unit in model.everything)
    units = tuple(unit.parameters for unit in model.units)
    counts = ModelCounts(everything, everything, units)
    sample = model.working_bytes + sum(unit.activation_bytes for unit in model.everything)
    ranks = plan.batch.ranks
    places = [node for node, size in enumerate(nodes) for _ in range(size)]
    return [
        rank_memory(
            plan.strategy.value,
            counts,
            nodes,
            activation_bytes=sample * rank.micro_batch_size,
            communication_dtype=plan.communication.dtype,
            accumulates=rank.accumulation_steps > 1,
            computes_on_hosts=True,
        )[node]
        for rank, node in zip(ranks, places, strict=True)
    ]


def placed(sizes: Mapping[str, Any], plan: Plan, nodes: Sequence[int]) -> list[int]:
    """The bytes of each rank under a plan that says of each unit how it is kept."""
    batch = plan.batch.ranks
    micro_batches = [rank.micro_batch_size for rank in batch]
    steps = max(rank.accumulation_steps for rank in batch)
    problem = pose_placement(model_sizes(**sizes), cluster_of(nodes), micro_batches, steps)
    return [needed for needed, _ in problem.by_rank(problem.memory(_counts(problem, plan))).values()]


def planned(sizes: Mapping[str, Any], samples: int, nodes: Sequence[int], limit: int) -> Plan:
    """The plan with the fastest placement that the planner finds in some bytes for each rank.

    Raises:
        ValueError: nothing fits.
    """
    world = sum(nodes)
    problem = pose_placement(model_sizes(**sizes), cluster_of(nodes, limit), [samples] * world)
    solution = solve(problem, known=uniform_placements(problem))
    if solution is None:
        raise ValueError(f"found a limit of {limit} bytes for each rank, expected one that some placement fits")
    placement = ModelPlacement(units=units_of(problem, solution))
    return Plan.from_batch_sizes([samples] * world, strategy="osdp", placement=placement)


def cluster_of(nodes: Sequence[int], limit: int = 2**40) -> PlacementCluster:
    """CPU nodes whose ranks have some bytes each; the seconds are of no meaning but that all links cost some."""
    return PlacementCluster(
        tuple(nodes),
        (RankProfile(TimeCurve((1, _LARGEST), (1.0, float(_LARGEST))), _LARGEST),) * sum(nodes),
        (limit,) * sum(nodes),
        LinkCost(1e-4, 1e-9),
        LinkCost(1e-5, 1e-10),
        streams=False,
    )


def _counts(problem: PlacementProblem, plan: Plan) -> list[list[int]]:
    return [
        [sum(plan.placement.of(unit) == option.placement for unit in kind.units) for option in kind.options]
        for kind in problem.kinds
    ]


@functools.cache
def model_sizes(blocks: int, width: int, vocabulary: int, tokens: int) -> ModelSizes:
    """The sizes of a `Transformer`; the activations of a block are those by which a model with one more differs."""
    whole, fewer = (_measure(number, width, vocabulary, tokens) for number in (blocks, blocks - 1))
    block, of_block = (whole[each] - fewer[each] for each in ("parameters", "activations"))
    units = tuple(
        UnitSize(
            f"blocks.{number}",
            block,
            block,
            of_block,
            4.0 * tokens * width,
            6.0 * tokens * block,
        )
        for number in range(blocks)
    )
    rest = whole["parameters"] - blocks * block
    kept = whole["activations"] - blocks * of_block
    root = UnitSize("", rest, rest, kept, 0.0, 6.0 * tokens * rest)
    # The gradient of the largest activation, and the one that it is computed from.
    return ModelSizes(units, root, working_bytes=2.0 * whole["largest"])


@functools.cache
def _measure(blocks: int, width: int, vocabulary: int, tokens: int) -> dict[str, int]:
    """Parameters, bytes that one sample keeps for its backward, and the largest tensor of these."""
    with FakeTensorMode():
        model = Transformer(blocks, width, vocabulary, tokens)
        saved = []
        for samples in (1, 2):
            ids = torch.zeros(samples, tokens, dtype=torch.long)
            saved.append(saved_bytes(model, {"input_ids": ids, "labels": ids}, output_loss))
    one, two = saved
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "activations": two.total - one.total,
        "largest": two.largest() - one.largest(),
    }
