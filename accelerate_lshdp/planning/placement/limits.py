# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the limits of memory allow: whether anything fits, the nearest limits that something fits, largest batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accelerate_lshdp.planning.cuts.bisection import least_integer
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.batches import Batch
from accelerate_lshdp.planning.placement.inputs import PlacementCluster
from accelerate_lshdp.planning.placement.options import uniform_placements
from accelerate_lshdp.planning.placement.problem import Counts, PlacementProblem
from accelerate_lshdp.planning.placement.room import find_room


#: The nearest limits are found to this part of them.
_PRECISION = 2**20
#: Branches that are looked at before limits are refused.
_BRANCHES = 400


def require_room(problem: PlacementProblem) -> None:
    """Checks that some placement keeps all limits.

    Raises:
        PlanningError: none does; it names limits, all by the same factor above those that were given, that one keeps.
    """
    if find_room(problem, _BRANCHES) is not None:
        return
    counts = _nearest_room(problem)
    needs = [
        f"{row.name} needs {need:,} bytes ({need / 1e9:.4g} GB) of {row.limit:,}"
        for row, need in zip(problem.rows, problem.memory(counts), strict=True)
        if need > row.limit
    ]
    raise PlanningError(
        "found memory limits that no placement of the model's units keeps with these micro-batches. The nearest that"
        f" one keeps: {'; '.join(needs)}. Raise the limits, or take smaller micro-batches"
    )


def _nearest_room(problem: PlacementProblem) -> Counts:
    """The counts of the placement that keeps the limits with the smallest factor on all of them."""
    found: dict[int, Counts] = {}

    def has_room(parts: int) -> bool:
        rows = tuple(replace(row, limit=row.limit * parts // _PRECISION) for row in problem.rows)
        counts = find_room(replace(problem, rows=rows))
        if counts is not None:
            found[parts] = counts
        return counts is not None

    enough = _PRECISION
    while not has_room(enough):
        enough *= 2
    return found[least_integer(enough // 2, enough, has_room)]


def largest_micro_batches(problem_of: Callable[[Batch], PlacementProblem], cluster: PlacementCluster) -> list[int]:
    """The largest micro-batch of each rank that some placement has room for while all others have one sample.

    Args:
        problem_of: the placement problem of a batch; it has room for one sample a rank.
        cluster: the ranks.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, row in enumerate(zip(cluster.profiles, cluster.node_sizes_of_ranks, cluster.memory_limits, strict=True)):
        profile, size, limit = row
        groups.setdefault((profile.time, profile.max_micro_batch_size, size, limit), []).append(rank)
    largest = [1] * cluster.world
    for ranks in groups.values():

        def is_too_much(samples: int, ranks: list[int] = ranks) -> bool:
            if samples > cluster.profiles[ranks[0]].max_micro_batch_size:
                return True
            sizes = [1] * cluster.world
            for rank in ranks:
                sizes[rank] = samples
            return find_room(problem_of(Batch(tuple(sizes)))) is None

        most = cluster.profiles[ranks[0]].max_micro_batch_size  # the same for all of the group
        # Sizes that fit are small more often than large: double first.
        below, beyond = 1, 2
        while beyond <= most and not is_too_much(beyond):
            below, beyond = beyond, 2 * beyond
        beyond = min(beyond, most + 1)
        if beyond <= most or below < most:
            below = least_integer(below, beyond, is_too_much) - 1
        for rank in ranks:
            largest[rank] = min(below, most)
    return largest


def uniform_micro_batches(
    problem_of: Callable[[Batch], PlacementProblem], cluster: PlacementCluster, steps: int
) -> list[list[int]]:
    """For each uniform placement that has room for one sample a rank: the largest micro-batches of all ranks.

    Memory is nearly linear in the samples, so it is known from those of one and of two. Where it grows faster later,
    what is found may be too large.

    Args:
        problem_of: poses the problem of a batch.
        cluster: its ranks.
        steps: micro-batches of a step; with several, gradients wait for the last one.
    """
    if any(profile.max_micro_batch_size == 1 for profile in cluster.profiles):
        return [[1] * cluster.world]
    one, two = (problem_of(Batch((samples,) * cluster.world, steps)) for samples in (1, 2))
    found = []
    for counts in uniform_placements(one):
        least, more = one.memory(counts), two.memory(counts)
        if not one.fits(counts):
            continue
        largest = [profile.max_micro_batch_size for profile in cluster.profiles]
        for row, need, further in zip(one.rows, least, more, strict=True):
            for rank in row.ranks:
                if further > need:
                    largest[rank] = min(largest[rank], 1 + (row.limit - need) // (further - need))
        found.append(largest)
    return found
