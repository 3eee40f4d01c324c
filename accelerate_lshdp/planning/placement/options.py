# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`pose_placement`: the placement problem of a model on a cluster with given micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.planning.cost.step_writer import BACKWARD_SHARE
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.moments import moments_of
from accelerate_lshdp.planning.placement.problem import (
    Counts,
    MemoryRow,
    Option,
    Phase,
    PlacementProblem,
    UnitKind,
)
from accelerate_lshdp.planning.placement.unit_costs import UnitCost, UnitCosts, whole_nanoseconds


#: The names of the units of each kind, and the costs of the placements that these may have.
_Offered = Sequence[tuple[list[str], list[UnitCost]]]


def pose_placement(
    model: ModelSizes,
    cluster: PlacementCluster,
    micro_batches: Sequence[int],
    steps: int = 1,
    *,
    costs: UnitCosts | None = None,
) -> PlacementProblem:
    """The problem of placing a model's units.

    Args:
        model: sizes of its units.
        cluster: ranks, links and limits.
        micro_batches: samples of a micro-batch, one a rank.
        steps: micro-batches of a step, the same number on all ranks.
        costs: of the units' placements on this cluster, which say what may be chosen. None: of all placements.

    Raises:
        PlanningError: micro-batches do not match the ranks or exceed their largest, or no store is left.
    """
    if len(micro_batches) != cluster.world or min(micro_batches) < 1 or steps < 1:
        raise PlanningError(
            f"found micro-batches of {list(micro_batches)} samples and {steps} steps, expected {cluster.world} sizes,"
            " one a rank, and all numbers at least 1"
        )
    costs = costs or UnitCosts(model, cluster)
    try:
        times = [profile.time(size) for profile, size in zip(cluster.profiles, micro_batches, strict=True)]
    except ValueError as error:
        raise PlanningError(str(error)) from error
    seconds = max(times)  # of the slowest rank, as all ranks meet in every exchange
    # Ranks that need the same memory: node size, samples, limit.
    ranks: dict[tuple[int, int, int], list[int]] = {}
    for rank, row in enumerate(zip(cluster.node_sizes_of_ranks, micro_batches, cluster.memory_limits, strict=True)):
        ranks.setdefault(row, []).append(rank)
    forward = whole_nanoseconds(seconds * (1 - BACKWARD_SHARE)) / model.flops if model.flops else 0.0
    kinds: dict[UnitSize, list[str]] = {}
    for unit in model.everything:
        # Units that differ in nothing but their names are of one kind; the root is one of its own.
        kinds.setdefault(unit if unit is model.root else unit.anonymous, []).append(unit.name)
    offered = [(names, costs.of(unit, steps > 1)) for unit, names in kinds.items()]
    moments = moments_of(model, cluster, costs.memory.knows_moments, offered)
    starts = _starting_rows(model, cluster, ranks, offered)
    rows = [
        moment.row("rank " + ", ".join(map(str, own[:4])) + (", ..." if len(own) > 4 else ""), samples, limit, own)
        for (_, samples, limit), own in ranks.items()
        for moment in moments
    ]
    hosts = enumerate(cluster.host_limits or ())
    rows += [MemoryRow(f"the host of node {node}", limit, 0, (0, 0, 0)) for node, limit in hosts]
    shapes = [(size, samples) for size, samples, _ in ranks]

    def memory(cost: UnitCost) -> tuple[int, ...]:
        """Bytes in each of the rows, in their order."""
        of_ranks = [moment.bytes_of(cost.memory, samples, size) for size, samples in shapes for moment in moments]
        of_hosts = [cost.memory.host_bytes] * len(cluster.host_limits or ())
        return (*map(math.ceil, of_ranks), *of_hosts, *(math.ceil(cost.memory.start_bytes[size]) for size in starts))

    return PlacementProblem(
        _phases(seconds, steps),
        (*rows, *starts.values()),
        tuple(
            UnitKind(tuple(names), tuple(_option(cost, memory(cost), forward) for cost in choices))
            for names, choices in offered
        ),
    )


def _phases(seconds: float, steps: int) -> tuple[Phase, ...]:
    """The phases of a step whose micro-batches are computed in some seconds each."""
    forward, backward = (
        whole_nanoseconds(seconds * (1 - BACKWARD_SHARE)),
        whole_nanoseconds(seconds * BACKWARD_SHARE),
    )
    if steps == 1:
        return Phase("forward", forward), Phase("backward", backward)
    return (
        Phase("first forward", forward),
        Phase("other forwards", forward, steps - 1),
        Phase("last backward", backward),
        Phase("other backwards", backward, steps - 1),
    )


def _starting_rows(
    model: ModelSizes,
    cluster: PlacementCluster,
    ranks: dict[tuple[int, int, int], list[int]],
    offered: _Offered,
) -> dict[int, MemoryRow]:
    """The rows of ranks at the start, by node size: where they compute in host memory, with the script's whole model.

    Only those that some placement exceeds: there are none unless limits are near the size of the model itself.
    """
    if not cluster.computes_on_hosts:
        return {}
    whole = cluster.process_bytes + math.ceil(
        sum(unit.parameters for unit in model.everything) * model.state_bytes.parameter
    )
    rows = {}
    for size in sorted(set(cluster.nodes)):
        limits = {limit: own for (node, _, limit), own in ranks.items() if node == size}
        least = min(limits)
        most = [
            len(names) * math.ceil(max(cost.memory.start_bytes[size] for cost in costs)) for names, costs in offered
        ]
        if whole + sum(most) > least:
            rows[size] = MemoryRow(f"the start of rank {limits[least][0]}", least, whole, (0, 0, 0))
    return rows


def _option(cost: UnitCost, memory: tuple[int, ...], forward: float) -> Option:
    """A placement's costs with a batch.

    Args:
        cost: without it.
        memory: bytes in each row.
        forward: nanoseconds of the slowest rank's forward for each operation of a sample's.
    """
    work = cost.work
    if cost.recomputed_flops:
        again, half = math.ceil(cost.recomputed_flops * forward), len(work) // 2
        work = (*work[:half], *(own + again for own in work[half:]))
    return Option(cost.placement, cost.send, work, cost.serial, memory, cost.memory.peaks)


def uniform_counts(problem: PlacementProblem, store: UnitStore, checkpoint: bool) -> Counts | None:
    """The counts of a problem if all units have one store, whole, with or without checkpointing.

    The root has the same store, or where it is not offered that which gathers as often. None: it is not offered.
    """
    counts = []
    for kind in problem.kinds:
        for wanted in ((store, checkpoint), (store, False), (UnitStore.WORLD, False)):
            is_root = kind.units == ("",)
            placements = [option.placement for option in kind.options]
            found = [(own.store, own.checkpoint) == wanted and own.slices == 1 for own in placements]
            if any(found) or not is_root:
                break
        if not any(found):
            return None
        counts.append([len(kind.units) * int(own) for own in found])
    return counts


def uniform_placements(problem: PlacementProblem, stores: Sequence[UnitStore] = tuple(UnitStore)) -> list[Counts]:
    """The placements in which all units have the same store, with and without checkpointing."""
    found = (uniform_counts(problem, store, checkpoint) for store in stores for checkpoint in (False, True))
    return [counts for counts in found if counts is not None]
