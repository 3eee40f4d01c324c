# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What ``placement="auto"`` plans from what was measured, for steps of several batches and batches that grow."""

from __future__ import annotations

import torch
from placement_problems import cluster_for, model_of_different_units
from torch.utils.data import DataLoader

from accelerate_lshdp import Plan
from accelerate_lshdp.accelerator import automatic_placement
from accelerate_lshdp.documents.placement import ModelPlacement, UnitStore
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement
from accelerate_lshdp.planning.placement.problem import PlacementProblem
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.placement.search import Solution, solve
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts


LOADER = DataLoader([0] * 64, batch_size=4)


def cluster_of(model: ModelSizes, limit: float, *, on_hosts: bool = False) -> PlacementCluster:
    return cluster_for(model, (1, 1), (int(limit),) * 2, streams=not on_hosts, largest=64)


def test_gradients_wait_between_the_batches_that_a_script_accumulates() -> None:
    model = model_of_different_units(1, 6)
    states = 16 * sum(unit.parameters for unit in model.everything)
    cluster = cluster_of(model, 0.9 * states)
    plan = Plan.from_batch_sizes([4, 4], strategy="osdp")
    once, _ = automatic_placement._plan(plan, model, cluster, LOADER, 1)
    often, batch = automatic_placement._plan(plan, model, cluster, LOADER, 3)
    assert batch is None
    # With several global batches in a step, units of all ranks keep their gradients whole between them.
    problem = pose_placement(model, cluster, (4, 4), 3)
    assert problem.fits(counts_of(problem, often.placement))
    assert not problem.fits(counts_of(problem, once.placement))


def test_micro_batches_are_smaller_where_gradients_wait_for_several_batches() -> None:
    units = tuple(UnitSize(f"h.{place}", 1_000_000, 1_000_000, 2_000_000, 2_000_000, 1e9) for place in range(8))
    model = ModelSizes(units, UnitSize("", 1000, 1000, 1000, 0, 1e6))
    plan = Plan.auto(32, strategy="osdp")
    # Shards of the states, two gathered units, one that is not reduced, and the activations of 16 samples a rank.
    limit = 8 * 16e6 / 2 + 3 * 4e6 + 16 * 2e6 * 8 + 1e6
    cluster = cluster_of(model, limit)
    _, once = automatic_placement._plan(plan, model, cluster, LOADER, 1)
    placed, often = automatic_placement._plan(plan, model, cluster, LOADER, 3)
    assert {rank.accumulation_steps for rank in once.ranks} == {1}
    assert {rank.accumulation_steps for rank in often.ranks} != {1} and often.total == 32
    assert placed.micro_batches == tuple((rank.micro_batch_size, 3 * rank.accumulation_steps) for rank in often.ranks)


def counts_of(problem: PlacementProblem, placement: ModelPlacement) -> list[list[int]]:
    counts = []
    for kind in problem.kinds:
        own = [0] * len(kind.options)
        for name in kind.units:
            own[[option.placement for option in kind.options].index(placement.of(name))] += 1
        counts.append(own)
    return counts


def test_batches_grow_within_the_limit_also_where_activations_have_holes() -> None:
    # Large activations, between which the C library's heap has holes where units are replicated.
    units = tuple(UnitSize(f"h.{place}", 500_000, 500_000, 4_000_000, 200_000, 1e9) for place in range(4))
    model = ModelSizes(units, UnitSize("", 1000, 1000, 1000, 0, 1e6), working_bytes=1e6)
    cluster = cluster_of(model, 400e6, on_hosts=True)
    for store in (UnitStore.WORLD, UnitStore.REPLICATE):
        costs = UnitCosts(model, cluster, [store], (False,))
        forced = PlacementResult.of(*solved(model, cluster, costs), ((2, 1), (2, 1)))
        most = automatic_placement._largest_micro_batch(model, cluster, forced, 0)
        fits = pose_placement(model, cluster, (most, 2), costs=costs)
        beyond = pose_placement(model, cluster, (most + 1, 2), costs=costs)
        assert fits.fits([[len(kind.units)] for kind in fits.kinds])
        assert not beyond.fits([[len(kind.units)] for kind in beyond.kinds])


def solved(model: ModelSizes, cluster: PlacementCluster, costs: UnitCosts) -> tuple[PlacementProblem, Solution]:
    problem = pose_placement(model, cluster, (2, 2), costs=costs)
    return problem, solve(problem)


def test_memory_is_measured_with_the_largest_batches_of_a_script() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(128))
    evaluation, training = DataLoader(data, batch_size=4), DataLoader(data, batch_size=64)
    assert automatic_placement._training_loader([evaluation, object(), training]) is training
    assert automatic_placement._training_loader([training, evaluation]) is training
