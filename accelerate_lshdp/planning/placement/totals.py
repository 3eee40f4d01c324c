# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`plan_trainable`, `place_sizes`: the best placement that the engine can train, for any or given sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.limits import require_room
from accelerate_lshdp.planning.placement.options import pose_placement, uniform_placements
from accelerate_lshdp.planning.placement.planner import Choice, plan_placement
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.placement.room import find_room
from accelerate_lshdp.planning.placement.search import solve
from accelerate_lshdp.planning.placement.unit_costs import UnitCosts


#: Micro-batches of a step that are tried first for a given total. More are worth their gathers only where memory
#: leaves no choice.
_MICRO_BATCHES = 8


def plan_trainable(
    model: ModelSizes,
    cluster: PlacementCluster,
    *,
    total_batch_size: int | None = None,
    most_steps: int | None = None,
    multiple_of: int = 1,
) -> PlacementResult:
    """The batch sizes and the placement that train the most samples a second within all limits.

    Args:
        model: sizes of its units.
        cluster: ranks, links and limits.
        total_batch_size: samples that the global batch has to have. None: any number.
        most_steps: the most micro-batches of a step. None: 1 without a total; with one up to `_MICRO_BATCHES`, and
            where these are too large for the memory, up to as many as leave each rank a sample.
        multiple_of: without a total: the global batch is a multiple of this number, where one fits.

    Raises:
        PlanningError: nothing fits, or the total cannot be cut; it names the nearest limits or total.
    """
    results, errors = [], []
    for choice in trainable_choices(model, cluster):
        try:
            results.append(_plan(model, cluster, choice, total_batch_size, most_steps, multiple_of))
        except PlanningError as error:
            errors.append(error)
    if not results:
        raise errors[-1]  # of the stores that need least memory
    return max(results, key=lambda result: result.predicted.samples_per_second)


def place_sizes(
    model: ModelSizes, cluster: PlacementCluster, micro_batches: Sequence[tuple[int, int]]
) -> PlacementResult:
    """The placement with which given batch sizes are trained fastest within all limits.

    Args:
        model: sizes of its units.
        cluster: ranks, links and limits.
        micro_batches: (samples, number in a step) of each rank.

    Raises:
        PlanningError: nothing fits; it names the nearest limits. Or ranks have different numbers of micro-batches.
    """
    steps = {count for _, count in micro_batches}
    if len(steps) != 1:
        raise PlanningError(
            f"found {sorted(steps)} micro-batches in a step, expected the same number on all ranks: units that all"
            " ranks share are gathered by all of them together"
        )
    results, unfit = [], None
    for choice in trainable_choices(model, cluster):
        costs = UnitCosts(model, cluster, choice.stores, choice.checkpoint, choice.slices)
        problem = pose_placement(model, cluster, [size for size, _ in micro_batches], *steps, costs=costs)
        try:
            require_room(problem)
        except PlanningError as error:
            unfit = error
            continue
        known = [counts for counts in uniform_placements(problem) if problem.fits(counts)]
        room = find_room(problem)
        solution = solve(problem, known=known if room is None else [*known, room])
        if solution is None:  # there is room, but the search was too short to find it again
            raise PlanningError("found no placement within the limits, expected one: raise the limits a little")
        results.append(PlacementResult.of(problem, solution, tuple(micro_batches)))
    if not results:
        raise unfit
    return min(results, key=lambda result: result.predicted.step_seconds)


def trainable_choices(model: ModelSizes, cluster: PlacementCluster) -> Iterator[Choice]:
    """Choices among stores whose units compute alike: in half precision whole ones use autocast, sharded ones do not.

    The engine can mix them; a plan does not, so that all blocks of a model round in the same way.
    """
    if model.state_bytes.gathered == model.state_bytes.parameter:
        yield Choice()
        return
    # Without streams the ranks of a node map one copy of the node, which is whole for each of them.
    whole = (UnitStore.REPLICATE,) if cluster.streams else (UnitStore.REPLICATE, UnitStore.NODE)
    yield Choice(stores=whole)
    # One rank alone has a second kind where units are streamed to it from host memory.
    if cluster.world > 1 or cluster.device_link is not None:
        yield Choice(stores=tuple(store for store in UnitStore if store not in whole))


def _plan(
    model: ModelSizes,
    cluster: PlacementCluster,
    choice: Choice,
    total: int | None,
    most_steps: int | None,
    multiple_of: int,
) -> PlacementResult:
    if total is not None:
        return _plan_total(model, cluster, choice, total, most_steps)
    free = plan_placement(model, cluster, most_steps=most_steps or 1, choice=choice)
    found = free.total_batch_size
    if found % multiple_of == 0:
        return free
    results = []
    for near in (found - found % multiple_of, found - found % multiple_of + multiple_of):
        if near < cluster.world:
            continue
        try:
            results.append(_plan_total(model, cluster, choice, near, most_steps or 1))
        except PlanningError:  # the larger one may not fit
            continue
    return max(results, key=lambda result: result.predicted.samples_per_second, default=free)


def _plan_total(
    model: ModelSizes, cluster: PlacementCluster, choice: Choice, total: int, most_steps: int | None
) -> PlacementResult:
    most = max(1, total // cluster.world) if most_steps is None else most_steps
    steps = min(_MICRO_BATCHES, most)
    while True:
        try:
            return plan_placement(model, cluster, total_batch_size=total, most_steps=steps, choice=choice)
        except PlanningError:
            if steps == most:
                raise
            steps = min(_MICRO_BATCHES * steps, most)
