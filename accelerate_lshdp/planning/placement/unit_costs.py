# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The costs of a unit with each of its placements, without a batch: computed once, used for every batch.

Times are those of `TrafficOf` and of the optimizer's step, bytes those of `MemoryOf`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.documents.unit_sizes import LEAST_SLICEABLE_ROWS
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.traffic import Traffic, TrafficOf, offered_stores
from accelerate_lshdp.planning.placement.unit_memory import MemoryOf, UnitMemory


#: Numbers of slices that are offered by default: more save little more memory, and each is a message.
SLICES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The costs of one placement of a unit.

    Args:
        placement: store, checkpointing and slices.
        send: nanoseconds of each phase for which links are busy.
        work: nanoseconds of each phase for which exchanges stop the computing.
        serial: nanoseconds of the optimizer step.
        recomputed_flops: operations of one sample that are repeated in the backward.
        memory: bytes that it takes.
    """

    placement: UnitPlacement
    send: tuple[int, ...]
    work: tuple[int, ...]
    serial: int
    recomputed_flops: float
    memory: UnitMemory


class UnitCosts:
    """The costs of all placements of a model's units on a cluster.

    Args:
        model: sizes of its units.
        cluster: ranks, links and limits.
        stores: that may be used. None: all that differ on the cluster.
        checkpoint: whether units may keep their activations (False), recompute them (True), or either. The root never
            recomputes.
        slices: numbers of slices in which weights of `world` units, and of a root on the host, may be gathered, if
            their sizes say that some can.
    """

    def __init__(
        self,
        model: ModelSizes,
        cluster: PlacementCluster,
        stores: Sequence[UnitStore] | None = None,
        checkpoint: Sequence[bool] = (False, True),
        slices: Sequence[int] = SLICES,
    ) -> None:
        self.model, self.cluster = model, cluster
        self._stores, self._checkpoint, self._slices = stores, tuple(checkpoint), tuple(slices)
        self._traffic = TrafficOf(cluster)
        self.memory = MemoryOf(model, cluster)
        self._trainable = model.trainable
        self._step_seconds: dict[UnitStore, float] = {}
        self._known: dict[tuple[UnitSize, bool], list[UnitCost]] = {}
        self._offered: dict[tuple[bool, bool], list[UnitPlacement]] = {}

    def of(self, unit: UnitSize, accumulates: bool) -> list[UnitCost]:
        """The costs of a unit's placements.

        Args:
            unit: of the model.
            accumulates: a step has several micro-batches: four phases instead of two.

        Raises:
            PlanningError: no store is left.
        """
        if (unit, accumulates) not in self._known:
            is_root = unit is self.model.root
            self._known[unit, accumulates] = [
                self._cost(unit, placement, accumulates, is_root)
                for placement in self._placements(is_root, unit.sliceable is not None)
            ]
        return self._known[unit, accumulates]

    def _placements(self, is_root: bool, is_sliceable: bool) -> list[UnitPlacement]:
        # The same for all units of a kind; each placement is a record, which checks all that it is given.
        if (is_root, is_sliceable) not in self._offered:
            self._offered[is_root, is_sliceable] = self._offer(is_root, is_sliceable)
        return self._offered[is_root, is_sliceable]

    def _offer(self, is_root: bool, is_sliceable: bool) -> list[UnitPlacement]:
        offered = offered_stores(self.cluster, is_root=is_root)
        stores = offered
        if self._stores is not None:
            stores = [store for store in offered if store in self._stores]
            # A root needs some store: where the only ones are none of its own, that which gathers as often.
            if is_root and not stores and UnitStore.WORLD in offered:
                stores = [UnitStore.WORLD]
        if not stores:
            raise PlanningError(
                f"found the stores {[str(store) for store in self._stores or ()]}, expected some of"
                f" {[str(store) for store in offered]}, which this cluster has"
            )
        most = LEAST_SLICEABLE_ROWS // self.cluster.world if is_sliceable else 1
        name = "" if is_root else "a unit"  # of stores that take slices, some do for the empty name alone
        return [
            UnitPlacement(store=store, checkpoint=checkpoint, slices=slices)
            for store, checkpoint, slices in product(stores, (False,) if is_root else self._checkpoint, self._slices)
            if slices == 1 or store.takes_slices(name) and slices <= most
        ]

    def _cost(self, unit: UnitSize, placement: UnitPlacement, accumulates: bool, is_root: bool) -> UnitCost:
        each, store, slices = self.model.state_bytes, placement.store, placement.slices
        in_slices = unit.sliceable.parameters if slices > 1 else 0
        whole = unit.parameters - in_slices
        # Which of them are frozen is not known: so that no sum is too small, as many as can be are trained.
        trained, trained_in_slices = min(whole, unit.trainable), min(in_slices, unit.trainable)
        optimizer = self._optimizer_seconds(unit, store)
        is_late = store is UnitStore.HOST and not is_root
        traffic = self._traffic.whole(
            store, whole * each.gathered, trained * each.gradient, optimizer if is_late else 0.0, is_root=is_root
        )
        if in_slices:
            reduced = each.gradient * trained_in_slices / in_slices
            traffic += self._traffic.sliced(placement, unit.sliceable, each.gathered, reduced)
        send, work = self._phase_seconds(traffic, accumulates)
        recomputed = unit.flops if placement.checkpoint else 0.0
        if in_slices and unit.sliceable.loss_bytes is not None:
            recomputed += unit.flops  # a head computes its logits again
        return UnitCost(
            placement,
            tuple(map(whole_nanoseconds, send)),
            tuple(map(whole_nanoseconds, work)),
            0 if is_late else whole_nanoseconds(optimizer),
            recomputed,
            self.memory.unit(unit, placement, accumulates),
        )

    def _phase_seconds(self, traffic: Traffic, accumulates: bool) -> tuple[list[float], list[float]]:
        """Seconds of each phase for which links are busy, and for which computing stops."""
        phases = [traffic.forward + traffic.first_forward, traffic.backward + traffic.last_backward]
        if accumulates:
            phases = [phases[0], traffic.forward, phases[1], traffic.backward]
        between, inside = [phase.between for phase in phases], [phase.inside for phase in phases]
        both, nothing = [sum(pair) for pair in zip(between, inside, strict=True)], [0.0] * len(phases)
        if self.cluster.streams:
            return both, nothing
        return (between, inside) if traffic.overlaps else (nothing, both)

    def _optimizer_seconds(self, unit: UnitSize, store: UnitStore) -> float:
        """Seconds of the optimizer step of a unit on the slowest rank or host."""
        if not self._trainable:
            return 0.0
        part = unit.trainable / self._trainable
        if store is UnitStore.HOST:
            return part * max(self.cluster.host_optimizer_seconds, default=0.0)
        if store not in self._step_seconds:
            ranks = zip(self.cluster.profiles, self.cluster.node_sizes_of_ranks, strict=True)
            seconds = (profile.fixed_seconds / self.memory.share(store, size) for profile, size in ranks)
            self._step_seconds[store] = max(seconds)
        return part * self._step_seconds[store]


def whole_nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded up: no prediction is shortened."""
    return math.ceil(seconds * 1e9)
