# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`pose_placement`: the placement problem of a model on a cluster with given micro-batches.

What each option costs: `traffic` says what it sends and when, `planning.cost.memory` what a parameter's states take.
A unit that is computed is gathered whole, or slice by slice; the gathered copy of `world_kept` stays from the forward
to the backward, and of `world_to_node` the node's shards do. The root is gathered, and its gradient not reduced, from
the first operation to the last, so both are counted throughout. Where a step has several micro-batches, world-sharded
units keep their whole gradients between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.planning.cost.step_writer import BACKWARD_SHARE
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.problem import (
    Counts,
    MemoryRow,
    Option,
    Phase,
    PlacementProblem,
    UnitKind,
)
from accelerate_lshdp.planning.placement.traffic import Seconds, Traffic, TrafficOf, offered_stores


def pose_placement(
    model: ModelSizes,
    cluster: PlacementCluster,
    micro_batches: Sequence[int],
    steps: int = 1,
    *,
    stores: Sequence[UnitStore] | None = None,
    checkpoint: Sequence[bool] = (False, True),
    slices: Sequence[int] = (1,),
) -> PlacementProblem:
    """The problem of placing a model's units.

    Args:
        model: sizes of its units.
        cluster: ranks, links and limits.
        micro_batches: samples of a micro-batch, one a rank.
        steps: micro-batches of a step, the same number on all ranks.
        stores: that may be used. None: all that differ on the cluster.
        checkpoint: whether units may keep their activations (False), recompute them (True), or either. The root never
            recomputes.
        slices: numbers of slices that units of world-sharded stores may be gathered in.

    Raises:
        PlanningError: micro-batches do not match the ranks or exceed their largest, or no store is left.
    """
    return _Poser(model, cluster, micro_batches, steps, stores, checkpoint, slices).problem()


def uniform_counts(problem: PlacementProblem, store: UnitStore, checkpoint: bool) -> Counts | None:
    """The counts of a problem if all units have one store, whole, with or without checkpointing.

    The root has the same store, or where it is not offered that which gathers as often. None: it is not offered.
    """
    counts = []
    for kind in problem.kinds:
        for wanted in ((store, checkpoint), (store, False), (UnitStore.WORLD, False)):
            is_root = kind.units == ("",)
            found = [
                (o.placement.store, o.placement.checkpoint) == wanted and o.placement.slices == 1 for o in kind.options
            ]
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


class _Poser:
    def __init__(
        self,
        model: ModelSizes,
        cluster: PlacementCluster,
        micro_batches: Sequence[int],
        steps: int,
        stores: Sequence[UnitStore] | None,
        checkpoint: Sequence[bool],
        slices: Sequence[int],
    ) -> None:
        if len(micro_batches) != cluster.world or min(micro_batches) < 1 or steps < 1:
            raise PlanningError(
                f"found micro-batches of {list(micro_batches)} samples and {steps} steps, expected {cluster.world}"
                " sizes, one a rank, and all numbers at least 1"
            )
        self.model, self.cluster, self.samples, self.steps = model, cluster, tuple(micro_batches), steps
        self.stores, self.checkpoint, self.slices = stores, tuple(checkpoint), tuple(slices)
        self.traffic = TrafficOf(cluster)
        try:
            seconds = [profile.time(size) for profile, size in zip(cluster.profiles, self.samples, strict=True)]
        except ValueError as error:
            raise PlanningError(str(error)) from error
        # Of the slowest rank; all ranks meet in every exchange.
        self.seconds = max(seconds)
        #: Ranks that need the same memory: node size, samples, limit.
        self.ranks: dict[tuple[int, int, int], list[int]] = {}
        rows = zip(cluster.node_sizes_of_ranks, self.samples, cluster.memory_limits, strict=True)
        for rank, row in enumerate(rows):
            self.ranks.setdefault(row, []).append(rank)

    def problem(self) -> PlacementProblem:
        kinds: dict[UnitSize, list[str]] = {}
        for unit in self.model.everything:
            # Units that differ in nothing but their names are of one kind; the root is one of its own.
            key = unit if unit is self.model.root else UnitSize("unit", *_sizes(unit))
            kinds.setdefault(key, []).append(unit.name)
        return PlacementProblem(
            self._phases(),
            self._rows(),
            tuple(
                UnitKind(tuple(names), tuple(self._options(unit, is_root=unit is self.model.root)))
                for unit, names in kinds.items()
            ),
        )

    def _phases(self) -> tuple[Phase, ...]:
        forward, backward = self.seconds * (1 - BACKWARD_SHARE), self.seconds * BACKWARD_SHARE
        first, last = Phase("forward", _whole(forward)), Phase("backward", _whole(backward))
        if self.steps == 1:
            return first, last
        more = self.steps - 1
        return (
            Phase("first forward", first.nanoseconds),
            Phase("other forwards", first.nanoseconds, more),
            Phase("last backward", last.nanoseconds),
            Phase("other backwards", last.nanoseconds, more),
        )

    def _rows(self) -> tuple[MemoryRow, ...]:
        rows = [
            MemoryRow(
                "rank " + ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else ""),
                limit,
                self.cluster.process_bytes + math.ceil(samples * self.model.working_bytes),
                (2, 1, samples),
                tuple(ranks),
            )
            for (_, samples, limit), ranks in self.ranks.items()
        ]
        for node, limit in enumerate(self.cluster.host_limits or ()):
            rows.append(MemoryRow(f"the host of node {node}", limit, 0, (0, 0, 0)))
        return tuple(rows)

    def _options(self, unit: UnitSize, *, is_root: bool) -> list[Option]:
        stores = offered_stores(self.cluster, is_root=is_root)
        if self.stores is not None:
            allowed = [store for store in stores if store in self.stores]
            # A root needs some store: where the only ones are none of its own, that which gathers as often.
            stores = allowed or ([UnitStore.WORLD] if is_root and UnitStore.WORLD in stores else [])
        options = []
        for store, checkpoint, slices in product(stores, self.checkpoint, self.slices):
            if slices > 1 and (is_root or not store.strategy.is_world_sharded):
                continue
            if is_root and checkpoint and False in self.checkpoint:
                continue
            options.append(self._option(unit, store, checkpoint and not is_root, slices, is_root))
        if not options:
            raise PlanningError(
                f"found the stores {[str(store) for store in self.stores or ()]}, expected some of"
                f" {[str(store) for store in offered_stores(self.cluster, is_root=is_root)]}, which this cluster has"
            )
        return options

    def _option(self, unit: UnitSize, store: UnitStore, checkpoint: bool, slices: int, is_root: bool) -> Option:
        each = self.model.state_bytes
        gathered, unreduced = unit.parameters * each.gathered, unit.trainable * each.unreduced
        traffic = self.traffic(
            store,
            gathered,
            unit.trainable * each.gradient,
            unit.parameters * each.parameter,
            slices=slices,
            is_root=is_root,
        )
        send, work = self._phase_seconds(traffic)
        if checkpoint:
            share = unit.flops / self.model.flops if self.model.flops else 0.0
            again = self.seconds * (1 - BACKWARD_SHARE) * share
            for place in range(len(work) // 2, len(work)):
                work[place] += again
        is_whole = store is UnitStore.REPLICATE
        peaks = (
            0 if is_whole or is_root or store is UnitStore.WORLD_KEPT else math.ceil(gathered / slices),
            0 if is_whole or is_root else math.ceil(unreduced / slices),
            math.ceil(unit.activation_bytes) if checkpoint else 0,
        )
        return Option(
            UnitPlacement(store=store, checkpoint=checkpoint, slices=slices),
            tuple(map(_whole, send)),
            tuple(map(_whole, work)),
            _whole(self._optimizer_seconds(unit, store)),
            self._memory(unit, store, checkpoint, is_root),
            peaks,
        )

    def _phase_seconds(self, traffic: Traffic) -> tuple[list[float], list[float]]:
        """Seconds of each phase for which links are busy, and for which computing stops."""
        first, last = traffic.forward + traffic.first_forward, traffic.backward + traffic.last_backward
        if self.steps == 1:
            phases: list[Seconds] = [first, last]
        else:
            phases = [first, traffic.forward, last, traffic.backward]
        if self.cluster.streams:
            return [phase.between + phase.inside for phase in phases], [0.0] * len(phases)
        if traffic.overlaps:
            return [phase.between for phase in phases], [phase.inside for phase in phases]
        return [0.0] * len(phases), [phase.between + phase.inside for phase in phases]

    def _optimizer_seconds(self, unit: UnitSize, store: UnitStore) -> float:
        """Seconds of the optimizer step of a unit on the slowest rank or host."""
        if not self.model.trainable:
            return 0.0
        part = unit.trainable / self.model.trainable
        if store is UnitStore.HOST:
            return part * max(self.cluster.host_optimizer_seconds, default=0.0)
        sizes = self.cluster.node_sizes_of_ranks
        return part * max(
            profile.fixed_seconds / self._share(store, size)
            for profile, size in zip(self.cluster.profiles, sizes, strict=True)
        )

    def _share(self, store: UnitStore, node_size: int) -> int:
        """The number of ranks that share one copy of a unit's states."""
        if store is UnitStore.REPLICATE:
            return 1
        return node_size if store.strategy.is_node_sharded else self.cluster.world

    def _memory(self, unit: UnitSize, store: UnitStore, checkpoint: bool, is_root: bool) -> tuple[int, ...]:
        """Bytes of a unit in each row, throughout the step."""
        each = self.model.state_bytes
        states = unit.parameters * each.parameter + unit.trainable * (each.gradient + each.optimizer)
        gathered, unreduced = unit.parameters * each.gathered, unit.trainable * each.unreduced
        kept = unit.input_bytes if checkpoint else unit.activation_bytes
        found = []
        for size, samples, _ in self.ranks:
            needed = 0.0 if store is UnitStore.HOST else states / self._share(store, size)
            if store is UnitStore.REPLICATE:
                needed += gathered if each.gathered != each.parameter else 0.0  # autocast's copy
            elif is_root:
                needed += gathered + unreduced
            else:
                needed += gathered if store is UnitStore.WORLD_KEPT else 0.0
                needed += gathered / size if store is UnitStore.WORLD_TO_NODE else 0.0
                if self.steps > 1 and store.strategy.is_world_sharded:
                    needed += unreduced
            found.append(math.ceil(needed + samples * kept))
        on_host = math.ceil(states) if store is UnitStore.HOST else 0
        return (*found, *(on_host for _ in self.cluster.host_limits or ()))


def _sizes(unit: UnitSize) -> tuple[int, int, float, float, float]:
    return unit.parameters, unit.trainable, unit.activation_bytes, unit.input_bytes, unit.flops


def _whole(seconds: float) -> int:
    """Whole nanoseconds, rounded up: no prediction is shortened."""
    return math.ceil(seconds * 1e9)
