# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Batch sizes and placements together: never slower than a uniform strategy, within all limits, refused clearly."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from placement_problems import cluster_for, least_nanoseconds, model_of_different_units

from accelerate_lshdp.documents.placement import ModelPlacement, UnitStore
from accelerate_lshdp.documents.strict_reading import require_json
from accelerate_lshdp.estimation.placement_estimate import host_state_bytes
from accelerate_lshdp.planning import PlanningError, plan_fixed_total
from accelerate_lshdp.planning.cost.memory import STATE_BYTES
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement, uniform_placements
from accelerate_lshdp.planning.placement.planner import Choice, plan_placement
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.placement.totals import plan_trainable
from accelerate_lshdp.planning.proofs.placement import verify_placement


def equal_blocks(blocks: int, width: int = 512, tokens: int = 128) -> ModelSizes:
    parameters = 12 * width**2
    units = tuple(
        UnitSize(
            f"h.{place}", parameters, parameters, 64 * width * tokens, 4 * width * tokens, 2 * tokens * parameters
        )
        for place in range(blocks)
    )
    root = 8_000 * width
    return ModelSizes(units, UnitSize("", root, root, 32_000 * tokens, 0, 2 * tokens * root), 32_000 * tokens)


@dataclass
class Case:
    """A cluster with limits that decide something, and what is asked for."""

    model: ModelSizes
    cluster: PlacementCluster
    total: int | None
    most_steps: int


def random_case(seed: int, largest: int = 24) -> Case:
    rng = random.Random(seed)
    model = equal_blocks(rng.randint(3, 16)) if seed % 3 else model_of_different_units(seed, rng.randint(3, 8))
    nodes = rng.choice(((2, 2), (1, 2), (4,), (1, 1, 1), (2, 1, 2), (1,)))
    world = sum(nodes)
    equal = rng.random() < 0.4
    speeds = [rng.choice((2e12, 5e12, 8e12)) for _ in nodes]
    states = 16 * sum(unit.parameters for unit in model.everything)
    sample = sum(unit.activation_bytes for unit in model.everything) + model.working_bytes
    limits = [int(states * rng.uniform(0.6, 1.4) + sample * rng.uniform(1, largest)) for _ in nodes]
    if equal:
        speeds, limits = [speeds[0]] * len(nodes), [limits[0]] * len(nodes)
    cluster = cluster_for(
        model,
        nodes,
        [limit for limit, size in zip(limits, nodes, strict=True) for _ in range(size)],
        bytes_per_second=10 ** rng.uniform(7.5, 10),
        flops=[speed for speed, size in zip(speeds, nodes, strict=True) for _ in range(size)],
        largest=largest,
        has_host=rng.random() < 0.3,
        streams=rng.random() < 0.7,
    )
    total = world * rng.randint(1, 16) if seed % 2 else None
    return Case(model, cluster, total, rng.choice((1, 2, 4)))


def best_uniform(case: Case) -> float:
    """The most samples a second of a uniform placement: with equal sizes, or with those that the cuts' planner gives
    where each rank takes what it has memory for. 0: none fits."""
    world, most = case.cluster.world, case.cluster.profiles[0].max_micro_batch_size
    best = 0.0
    for steps in range(1, case.most_steps + 1):
        sizes = {(size,) * world for size in range(1, most + 1)}
        if case.total is not None:
            if case.total % steps:
                continue
            each = case.total // steps
            sizes = {own for own in sizes if sum(own) == each} | set(_cuts(case, each, steps))
        for own in sizes:
            problem = pose_placement(case.model, case.cluster, own, steps)
            for counts in uniform_placements(problem):
                if problem.fits(counts):
                    best = max(best, sum(own) * steps / (problem.nanoseconds(counts) / 1e9))
    return best


def _cuts(case: Case, total: int, steps: int) -> Any:
    """For each uniform placement the cut of a total with which the slowest rank is fastest, by exact memory."""
    cluster, world = case.cluster, case.cluster.world
    most = cluster.profiles[0].max_micro_batch_size
    problems = [pose_placement(case.model, cluster, (size,) * world, steps) for size in range(1, most + 1)]
    for place, _ in enumerate(uniform_placements(problems[0])):
        room = [0] * world
        for size, problem in enumerate(problems, 1):
            counts = uniform_placements(problem)[place]
            for row, need in zip(problem.rows, problem.memory(counts), strict=True):
                for rank in row.ranks:
                    room[rank] = size if need <= row.limit else room[rank]
        if min(room) >= 1 and world <= total <= sum(room):
            pairs = zip(cluster.profiles, room, strict=True)
            yield tuple(plan_fixed_total([replace(p, max_micro_batch_size=n) for p, n in pairs], total).batch_sizes)


def check(case: Case, result: PlacementResult) -> None:
    """The result keeps what was asked for, and its certificate proves what it says."""
    verify_placement(result.problem, json.loads(json.dumps(result.certificate)))
    sizes = [size for size, _ in result.micro_batches]
    steps = {number for _, number in result.micro_batches}
    assert len(steps) == 1 and max(steps) <= case.most_steps
    assert case.total in (None, result.total_batch_size)
    assert result.problem == pose_placement(case.model, case.cluster, sizes, steps.pop())
    assert result.predicted.memory_limit_bytes == case.cluster.memory_limits
    assert all(n <= m for n, m in zip(result.predicted.memory_bytes, case.cluster.memory_limits, strict=True))
    names = [name for name, _ in result.placement.units]
    assert sorted(names) == sorted(unit.name for unit in case.model.everything)


@pytest.mark.parametrize(
    "seeds",
    [range(8), *(pytest.param(range(first, first + 20), marks=pytest.mark.slow) for first in range(0, 200, 20))],
    ids=str,
)
def test_never_slower_than_a_uniform_strategy(seeds: range) -> None:
    """200 clusters, 8 of them by default; where nothing fits, no uniform strategy does."""
    faster = refused = 0
    for seed in seeds:
        case = random_case(seed)
        uniform = best_uniform(case)
        try:
            result = plan_placement(case.model, case.cluster, total_batch_size=case.total, most_steps=case.most_steps)
        except PlanningError:
            assert uniform == 0, f"case {seed}"
            refused += 1
            continue
        check(case, result)
        assert result.predicted.samples_per_second >= uniform * (1 - 1e-12), f"case {seed}"
        faster += result.predicted.samples_per_second > 1.001 * uniform
    assert faster >= len(seeds) / 4 and refused <= len(seeds) * 0.4


@pytest.mark.parametrize("seed", [*range(12), 40, 49, 53, 66, 67])
def test_batch_and_placement_together_are_the_optimum(seed: int) -> None:
    """Two unequal ranks, all sizes of their micro-batches and all placements tried."""
    rng = random.Random(seed)
    model = model_of_different_units(seed, 3)
    states = 16 * sum(unit.parameters for unit in model.everything)
    sample = sum(unit.activation_bytes for unit in model.everything) + model.working_bytes
    cluster = cluster_for(
        model,
        (1, 1),
        [int(states * rng.uniform(0.7, 1.2) + sample * rng.uniform(1, 6)) for _ in range(2)],
        bytes_per_second=10 ** rng.uniform(8, 9.5),
        flops=[rng.uniform(2e12, 6e12) for _ in range(2)],
        largest=5,
    )
    best = 0.0
    for sizes in itertools.product(range(1, 6), repeat=2):
        nanoseconds = least_nanoseconds(pose_placement(model, cluster, sizes))
        best = max(best, sum(sizes) / (nanoseconds / 1e9) if nanoseconds else 0.0)
    if not best:
        with pytest.raises(PlanningError, match="nearest"):
            plan_placement(model, cluster)
        return
    result = plan_placement(model, cluster)
    assert result.predicted.samples_per_second == pytest.approx(best, rel=1e-9)


def test_more_memory_is_never_slower() -> None:
    model = equal_blocks(8)
    states = 16 * sum(unit.parameters for unit in model.everything)
    rates = []
    for share in (0.5, 0.7, 0.9, 1.1, 1.5):
        cluster = cluster_for(model, (2, 2), (int(states * share),) * 4, bytes_per_second=2e8, largest=16)
        rates.append(plan_placement(model, cluster).predicted.samples_per_second)
    assert rates == sorted(rates) and rates[-1] > 1.1 * rates[0]


def test_units_have_only_what_is_allowed() -> None:
    model = equal_blocks(6)
    cluster = cluster_for(model, (2, 2), (10**9,) * 4, largest=8)
    choice = Choice(stores=(UnitStore.WORLD, UnitStore.NODE), checkpoint=(True,), slices=(1, 2))
    placement = plan_placement(model, cluster, choice=choice).placement
    assert {own.store for _, own in placement.units} <= {UnitStore.WORLD, UnitStore.NODE}
    assert all(own.checkpoint for name, own in placement.units if name)
    # The root has no block whose activations could be recomputed.
    assert not placement.of("").checkpoint


def test_limits_that_nothing_fits_name_the_nearest_that_something_does() -> None:
    model = equal_blocks(6)
    cluster = cluster_for(model, (1, 2), (150_000_000, 100_000_000, 100_000_000), largest=8)
    with pytest.raises(PlanningError, match="The nearest that one keeps: rank 0 needs .* GB") as error:
        plan_placement(model, cluster)
    named = [int(need.replace(",", "")) for need in re.findall(r"needs ([\d,]+) bytes", str(error.value))]
    assert len(named) == 2 and "rank 1, 2 needs" in str(error.value)
    limits = (named[0], named[1], named[1])
    enough = plan_placement(model, replace(cluster, memory_limits=limits))
    assert set(enough.micro_batches) == {(1, 1)}
    less = tuple(int(0.999 * limit) for limit in limits)
    with pytest.raises(PlanningError, match="nearest that one keeps"):
        plan_placement(model, replace(cluster, memory_limits=less))


def test_totals_that_no_ranks_can_take_name_the_nearest() -> None:
    model = equal_blocks(4)
    cluster = cluster_for(model, (1, 1, 1), (10**10,) * 3, largest=5)
    for total, nearest in ((2, 3), (16, 15), (0, 3), (10**15, 15)):
        with pytest.raises(PlanningError, match=f"the nearest is {nearest}$"):
            plan_placement(model, cluster, total_batch_size=total)
    assert plan_placement(model, cluster, total_batch_size=16, most_steps=2).micro_batches[0][1] == 2


def test_results_are_what_plans_carry() -> None:
    result = plan_placement(equal_blocks(5), cluster_for(equal_blocks(5), (2, 2), (2 * 10**8,) * 4, largest=8))
    document = json.loads(json.dumps(result.placement.to_dict()))
    assert ModelPlacement.read(document) == result.placement
    assert result.placement.memory_limit_bytes == (2 * 10**8,) * 4
    predicted = json.loads(json.dumps(result.predicted.to_dict()))
    assert (
        predicted["memory_bytes"] == list(result.predicted.memory_bytes) and predicted["gap"] == result.predicted.gap
    )
    require_json(result.certificate)  # as deep and as long as a plan file may be
    assert [name for name, _ in result.placement.units][:5] == [f"h.{place}" for place in range(5)]


def test_equal_units_with_different_placements_take_turns() -> None:
    """Recomputing and sending are spread over the model, not heaped up at one end of it."""
    model = equal_blocks(12)
    for share in (0.6, 0.8, 1.0):
        states = 16 * sum(unit.parameters for unit in model.everything)
        cluster = cluster_for(model, (2, 2), (int(states * share),) * 4, bytes_per_second=2e8, largest=8)
        placements = [own for name, own in plan_placement(model, cluster).placement.units if name]
        for kind in set(placements):
            count = placements.count(kind)
            in_first_half = placements[:6].count(kind)
            assert abs(in_first_half - count / 2) <= 1


def test_one_rank_streams_in_half_precision() -> None:
    """Its device is too small for the model, whose blocks fit the host."""
    model = replace(equal_blocks(12), state_bytes=STATE_BYTES["bf16"])
    whole = 16 * sum(unit.parameters for unit in model.everything)
    cluster = cluster_for(model, (1,), (whole // 2,), has_host=True)
    result = plan_trainable(model, cluster, total_batch_size=1)
    assert UnitStore.HOST in {placed.store for _, placed in result.placement.units}
    streamed = [unit for unit in model.everything if result.placement.of(unit.name).store is UnitStore.HOST]
    # What is streamed is a copy in half precision.
    assert host_state_bytes(result, model) == sum((16 + 2) * unit.parameters for unit in streamed)
