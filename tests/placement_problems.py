# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Random placement problems, and their answers by trying every placement in integers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import comb
from typing import Any

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import UnitPlacement
from accelerate_lshdp.documents.unit_sizes import SliceableWeights
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.options import pose_placement
from accelerate_lshdp.planning.placement.problem import (
    MemoryRow,
    Option,
    Phase,
    PlacementProblem,
    UnitKind,
)
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts


def random_problem(
    seed: int,
    *,
    kinds: int,
    units: int,
    options: int,
    rows: int = 1,
    phases: int = 2,
    scale: int = 1000,
    tightness: float | None = None,
) -> PlacementProblem:
    """A problem whose options trade time for memory, as stores do, with noise on both.

    Args:
        seed: of everything random.
        kinds: number of kinds of units.
        units: the most units of a kind; each has 1 to so many.
        options: of each kind.
        rows: of memory.
        phases: of a step.
        scale: nanoseconds and bytes of a small unit.
        tightness: from 0 (the limits are about what the leanest placement needs) to 1 (what the fattest one needs).
            None: random for each row.
    """
    rng = random.Random(seed)
    counts = [rng.randint(1, units) for _ in range(kinds)]
    made = []
    for kind, count in enumerate(counts):
        size, own = rng.randint(scale, 8 * scale), []
        for _ in range(options):
            lean = rng.random()
            checkpoint = rng.random() < 0.5
            own.append(
                Option(
                    UnitPlacement(checkpoint=checkpoint),
                    tuple(int(size * lean * rng.uniform(0, 1.5)) for _ in range(phases)),
                    tuple(int(size * rng.uniform(0, 0.6)) * checkpoint * (place > 0) for place in range(phases)),
                    rng.randint(0, scale // 10),
                    tuple(int(size * (1.2 - lean) * rng.uniform(2, 6)) for _ in range(rows)),
                    tuple(rng.choice((0, size // 2, size)) for _ in range(3)),
                )
            )
        made.append(UnitKind(tuple(f"{kind}.{number}" for number in range(count)), tuple(own)))
    whole = sum(counts) * scale
    limits = []
    for row in range(rows):
        lean, fat = (
            sum(
                count * pick(option.memory[row] for option in kind.options)
                for count, kind in zip(counts, made, strict=True)
            )
            for pick in (min, max)
        )
        share = rng.random() if tightness is None else tightness
        limits.append(int(lean + share * (fat - lean)) + rng.randint(0, 20 * scale))
    return PlacementProblem(
        tuple(Phase(f"phase {place}", rng.randint(0, 4 * whole), rng.choice((1, 1, 3))) for place in range(phases)),
        tuple(
            MemoryRow(f"row {row}", limit, rng.randint(0, scale), (2, 1, rng.randint(1, 3)))
            for row, limit in enumerate(limits)
        ),
        tuple(made),
        rng.randint(0, scale),
    )


def model_of_different_units(seed: int, units: int) -> ModelSizes:
    """A model like a transformer whose blocks all have other sizes."""
    rng, tokens, width = random.Random(seed), 256, 1024
    made = []
    for number in range(units):
        parameters = int(12 * width**2 * rng.uniform(0.3, 2))
        kept = int(64 * width * tokens * rng.uniform(0.3, 2))
        weights = SliceableWeights(parameters // 2, parameters // 2, parameters // 2, 4)
        flops = 2 * tokens * parameters
        made.append(UnitSize(f"block.{number}", parameters, parameters, kept, kept // 16, flops, weights))
    root = 20_000 * width
    logits = 4 * 20_000 * tokens
    head = SliceableWeights(root, 2 * root, root, 2)
    return ModelSizes(tuple(made), UnitSize("", root, root, logits, 0, 2 * tokens * root, head), logits)


def cluster_for(
    model: ModelSizes,
    nodes: Sequence[int],
    limits: Sequence[int],
    *,
    bytes_per_second: float = 1e9,
    flops: Sequence[float] | None = None,
    largest: int = 64,
    has_host: bool = False,
    streams: bool = True,
    **more: Any,
) -> PlacementCluster:
    """A cluster whose ranks train a model at given operations per second, linear in the samples."""
    world = sum(nodes)
    seconds = [3 * model.flops / speed for speed in flops or (6.5e12,) * world]
    profiles = tuple(
        RankProfile(TimeCurve((1, largest), (each, largest * each)), largest, fixed_seconds=1e-11 * model.trainable)
        for each in seconds
    )
    return PlacementCluster(
        tuple(nodes),
        profiles,
        tuple(limits),
        LinkCost(30e-6, 1 / bytes_per_second),
        LinkCost(4e-6, 1 / 6e9),
        device_link=LinkCost(20e-6, 1 / 10e9) if has_host else None,
        host_optimizer_seconds=(2e-10 * model.trainable,) * len(nodes) if has_host else (),
        streams=streams,
        **more,
    )


def problem_of_different_units(seed: int, units: int) -> PlacementProblem:
    """Where to put the blocks of `model_of_different_units` on a random cluster whose memory decides."""
    rng = random.Random(seed)
    model, nodes = model_of_different_units(seed, units), rng.choice(((8, 8), (4, 4, 4), (8, 4), (8,)))
    ample = (10**14,) * sum(nodes)
    cluster = cluster_for(
        model, nodes, ample, bytes_per_second=10 ** rng.uniform(8, 10.2), has_host=rng.random() < 0.5
    )
    slices = rng.choice(((1,), (1, 4)))
    sizes = (rng.randint(1, 12),) * sum(nodes)
    problem = pose_placement(model, cluster, sizes, costs=UnitCosts(model, cluster, slices=slices))
    share, rows = rng.uniform(0.02, 0.7), []
    for place, row in enumerate(problem.rows):
        lean, fat = (
            sum(len(kind.units) * pick(option.memory[place] for option in kind.options) for kind in problem.kinds)
            for pick in (min, max)
        )
        peak = sum(
            weight * max(option.peaks[peak] for kind in problem.kinds for option in kind.options)
            for peak, weight in enumerate(row.peak_weights)
        )
        rows.append(replace(row, limit=int(row.fixed + lean + peak + share * (fat - lean))))
    return replace(problem, rows=tuple(rows))


def placement_count(problem: PlacementProblem) -> int:
    """The number of different placements."""
    product = 1
    for kind in problem.kinds:
        product *= comb(len(kind.units) + len(kind.options) - 1, len(kind.options) - 1)
    return product


def least_nanoseconds(problem: PlacementProblem) -> int | None:
    """The shortest step of all placements within the limits, all of which are tried; None: there is none."""
    sends, works, memory, serial, peaks = (np.zeros((1, n), dtype=np.int64) for n in (*_widths(problem), 1, 3))
    for kind in problem.kinds:
        counts = np.array(list(compositions(len(kind.units), len(kind.options))), dtype=np.int64)
        own_peaks = (np.array([o.peaks for o in kind.options])[None] * (counts > 0)[..., None]).max(1)
        sends = _sums(sends, counts @ np.array([o.send for o in kind.options]))
        works = _sums(works, counts @ np.array([o.work for o in kind.options]))
        memory = _sums(memory, counts @ np.array([o.memory for o in kind.options]))
        serial = _sums(serial, counts @ np.array([[o.serial] for o in kind.options]))
        peaks = np.maximum(peaks[:, None], own_peaks[None]).reshape(-1, 3)
    computed = works + np.array([phase.nanoseconds for phase in problem.phases])
    times = np.array([phase.times for phase in problem.phases])
    steps = problem.serial + serial[:, 0] + np.maximum(computed, sends) @ times
    weights = np.array([row.peak_weights for row in problem.rows])
    needed = memory + peaks @ weights.T + np.array([row.fixed for row in problem.rows])
    fits = (needed <= np.array([row.limit for row in problem.rows])).all(1)
    return int(steps[fits].min()) if fits.any() else None


def _widths(problem: PlacementProblem) -> tuple[int, int, int]:
    return len(problem.phases), len(problem.phases), len(problem.rows)


def _sums(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Sums of each row of the one and each row of the other."""
    return (first[:, None] + second[None]).reshape(-1, first.shape[1])


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)
