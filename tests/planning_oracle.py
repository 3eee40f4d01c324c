# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Random small planning problems, and their answers by trying everything in exact arithmetic."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from accelerate_lshdp.planning import MemoryCurve, RankProfile, TimeCurve


# Values on the grid of quarters, between sizes of at most 12: all times are whole multiples of this part of a second.
UNITS = 4 * math.lcm(*range(1, 13))


@dataclass
class Instance:
    """One problem: the ranks and the options of both planners."""

    profiles: list[RankProfile]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> list[list[int]]:
        return self.options.get("shard_groups") or [[rank] for rank in range(len(self.profiles))]


def random_curve(rng: random.Random, largest: int) -> TimeCurve:
    """A small curve on a coarse grid of times, so that plateaus, dips and ties between ranks are common."""
    sizes = sorted(rng.sample(range(1, largest + 1), rng.randint(1, min(largest, 5))))
    seconds = [rng.randint(1, 12) / 4 for _ in sizes]
    if rng.random() < 0.6:
        seconds.sort()
    return TimeCurve(sizes, seconds)


def random_instance(rng: random.Random, ranks: int, largest: int) -> Instance:
    """Plateaus, dips, caps, memory curves, accumulation, overheads, optimizer steps, buckets and groups, by chance."""
    buckets = rng.choice([0, 0, 1, 2])
    accumulates = rng.random() < 0.7
    profiles = []
    for _ in range(ranks):
        time = random_curve(rng, largest)
        last = time.batch_sizes[-1]
        ready = None
        if buckets:
            ready = []
            for _ in range(buckets):
                curve = random_curve(rng, largest)
                sizes = [*(size for size in curve.batch_sizes if size < last), last]
                ready.append(TimeCurve(sizes, [rng.randint(1, 8) / 4 for _ in sizes]))
        memory = limit = None
        if rng.random() < 0.3:
            sizes = sorted(rng.sample(range(1, largest + 1), rng.randint(1, min(largest, 3))))
            memory = MemoryCurve(sizes, [rng.randint(2, 9) for _ in sizes])
            limit = rng.randint(memory.bytes[0], 9)
        profiles.append(
            RankProfile(
                time,
                rng.randint(1, last),
                accumulation_overhead_seconds=rng.choice([0.0, 0.0, 0.25, 1.0]),
                bucket_ready=ready,
                communication_load_seconds=rng.choice([0.0, 0.0, 0.25, 1.5]),
                fixed_seconds=rng.choice([0.0, 0.0, 0.5]),
                memory=memory,
                memory_limit_bytes=limit,
            )
        )
    groups = None
    if rng.random() < 0.5:
        places = [rng.randrange(rng.choice([1, 2, 2, 3])) for _ in range(ranks)]
        groups = [[rank for rank in range(ranks) if places[rank] == place] for place in sorted(set(places))]
        rng.shuffle(groups)
    return Instance(
        profiles,
        {
            "allow_accumulation": accumulates,
            "bucket_seconds": [rng.randint(0, 6) / 4 for _ in range(buckets)] if buckets else None,
            "shard_groups": groups,
        },
    )


def running_maximum(sizes: Sequence[int], values: Sequence[float], size: int) -> Fraction:
    """The definition, read literally: the largest interpolated value at any size up to `size`."""

    def interpolated(at: int) -> Fraction:
        points = list(zip(sizes, map(Fraction, values), strict=True))
        if at <= points[0][0]:
            return points[0][1]
        (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if pair[0][0] < at <= pair[1][0])
        return y0 + (y1 - y0) * Fraction(at - x0, x1 - x0)

    return max(interpolated(at) for at in range(1, size + 1))


def finish_units(instance: Instance, rank: int, most_steps: int, most_samples: int) -> list[tuple[int, int, int]]:
    """(m, k, when the rank has finished k micro-batches of m samples, in units of 1 / UNITS seconds), all of them."""
    profile, buckets = instance.profiles[rank], instance.options["bucket_seconds"]
    result = []
    for size in range(1, profile.max_micro_batch_size + 1):
        if profile.memory_limit_bytes is not None:
            memory = profile.memory
            if size > memory.batch_sizes[-1]:
                break
            if running_maximum(memory.batch_sizes, memory.bytes, size) > profile.memory_limit_bytes:
                break
        time = running_maximum(profile.time.batch_sizes, profile.time.seconds, size)
        last = time + Fraction(profile.communication_load_seconds)
        for place in range(len(buckets or ())):
            curve = profile.bucket_ready[place]
            ready = running_maximum(curve.batch_sizes, curve.seconds, size)
            last = max(last, ready + sum(map(Fraction, buckets[place:])))
        for steps in range(1, min(most_steps, most_samples // size) + 1):
            more = (steps - 1) * (time + Fraction(profile.accumulation_overhead_seconds))
            units = (Fraction(profile.fixed_seconds) + more + last) * UNITS
            assert units.denominator == 1
            result.append((size, steps, int(units)))
    return result


def all_choices(instance: Instance, most_steps: int, most_samples: int) -> tuple[np.ndarray, ...]:
    """Every choice of micro-batches for all ranks: sizes and steps (shape [choices, ranks]), and the slowest finish.

    Choices that give a rank, or the ranks together, more than `most_samples` are left out.
    """
    ranks = len(instance.profiles)
    sizes = steps = np.zeros((1, 0), dtype=np.int64)
    samples = slowest = np.zeros(1, dtype=np.int64)
    for rank in range(ranks):
        own = np.array(finish_units(instance, rank, most_steps, most_samples), dtype=np.int64)
        before, choice = (index.ravel() for index in np.indices((len(sizes), len(own))))
        samples = samples[before] + own[choice, 0] * own[choice, 1]
        kept = samples <= most_samples - (ranks - rank - 1)
        group = next(group for group in instance.groups if rank in group)
        for other in group:
            if other < rank:
                kept &= steps[before, other] == own[choice, 1]
        before, choice, samples = before[kept], choice[kept], samples[kept]
        sizes = np.column_stack([sizes[before], own[choice, 0]])
        steps = np.column_stack([steps[before], own[choice, 1]])
        slowest = np.maximum(slowest[before], own[choice, 2])
    return sizes, steps, slowest


def first_by_tie_rules(sizes: np.ndarray, steps: np.ndarray) -> list[tuple[int, int]]:
    """Smallest spread of the batches, fewest micro-batches, lexicographically smallest batches, then micro-batches."""
    batches = sizes * steps
    keys = zip(
        (batches.max(axis=1) - batches.min(axis=1)).tolist(),
        steps.sum(axis=1).tolist(),
        batches.tolist(),
        (list(zip(*rows, strict=True)) for rows in zip(sizes.tolist(), steps.tolist(), strict=True)),
        strict=True,
    )
    return min(keys)[3]


def best_fixed_total(instance: Instance, total: int) -> tuple[Fraction, list[tuple[int, int]]] | None:
    """The least step time of any cut of `total`, and the cut; None if there is no cut."""
    most_steps = total if instance.options["allow_accumulation"] else 1
    sizes, steps, slowest = all_choices(instance, most_steps, total)
    kept = (sizes * steps).sum(axis=1) == total
    if not kept.any():
        return None
    sizes, steps, slowest = sizes[kept], steps[kept], slowest[kept]
    best = slowest == slowest.min()
    return Fraction(int(slowest.min()), UNITS), first_by_tie_rules(sizes[best], steps[best])


def best_throughput(
    instance: Instance, communication_seconds: float, most_steps: int, multiple_of: int = 1
) -> tuple[Fraction, list[tuple[int, int]]]:
    """The most samples a second of any choice whose total is such a multiple, and the choice."""
    sizes, steps, slowest = all_choices(instance, most_steps, 10**6)
    allowed = (sizes * steps).sum(axis=1) % multiple_of == 0
    sizes, steps, slowest = sizes[allowed], steps[allowed], slowest[allowed]
    communication = Fraction(communication_seconds) * UNITS
    assert communication.denominator == 1
    samples, units = (sizes * steps).sum(axis=1), slowest + int(communication)
    # Only the most samples for each time can be best: few enough for fractions.
    most = {time: int(samples[units == time].max()) for time in set(units.tolist())}
    time, number = max(most.items(), key=lambda item: Fraction(item[1], item[0]))
    best = samples * time == number * units
    return Fraction(number * UNITS, time), first_by_tie_rules(sizes[best], steps[best])
