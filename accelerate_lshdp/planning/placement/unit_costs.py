# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The costs of a unit with each of its placements, without a batch: computed once, used for every batch.

A unit that is computed is gathered whole, but for weights in slices, of which there is one slice at a time; the
gathered copy of `world_kept` stays from the forward to the backward, and of `world_to_node` the node's shards do. The
root is gathered, and its gradient not reduced, from the first operation to the last, so both are counted throughout.
Where a step has several micro-batches, world-sharded units keep what is not in slices of their gradients between them.

Where ranks compute in host memory those of a node map one copy: nothing is gathered inside it, and gradients wait for
the ranks of the node that add theirs first. The terms are those of `planning.cost.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from accelerate_lshdp.documents.bucket_sizes import WAITING_BUCKETS
from accelerate_lshdp.documents.host_memory import HOLES_OF_ACTIVATIONS
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.documents.unit_sizes import LEAST_SLICEABLE_ROWS
from accelerate_lshdp.planning.cost.memory import passing_bytes, waiting_bytes
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize
from accelerate_lshdp.planning.placement.traffic import Traffic, TrafficOf, offered_stores


#: Numbers of slices that are offered by default: more save little more memory, and each is a message.
SLICES = (1, 2, 4)
#: Tensors of the size of one slice's logits that a head in slices has at a time.
_SLICES_OF_LOGITS = 3


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The costs of one placement of a unit.

    Args:
        placement: store, checkpointing and slices.
        send: nanoseconds of each phase for which links are busy.
        work: nanoseconds of each phase for which exchanges stop the computing.
        serial: nanoseconds of the optimizer step.
        state_bytes: bytes throughout a step on a rank of each node size, without activations.
        host_bytes: bytes on each host.
        sample_bytes: bytes of one sample that are kept for the backward.
        recomputed_flops: operations of one sample that are repeated in the backward.
        peaks: bytes of each `Peak`, recomputed ones for each sample.
        start_bytes: bytes at the start on a rank of each node size, beside the whole model.
        coming_bytes: bytes of `state_bytes` that only come as activations go.
    """

    placement: UnitPlacement
    send: tuple[int, ...]
    work: tuple[int, ...]
    serial: int
    state_bytes: dict[int, float]
    host_bytes: int
    sample_bytes: float
    recomputed_flops: float
    peaks: tuple[int, int, int]
    start_bytes: dict[int, float]
    coming_bytes: float = 0.0

    def bytes_with(self, samples: int, node_size: int) -> float:
        """Bytes throughout a step with a micro-batch of some samples."""
        activations = samples * self.sample_bytes
        # Half of the activations: some exist only in the backward.
        return self.state_bytes[node_size] + activations - min(self.coming_bytes, activations / 2)


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
        # What the costs of each unit need of all of them, and of all ranks.
        self._trainable = model.trainable
        everything, nodes = self._trainable * model.state_bytes.gradient, len(cluster.nodes)
        self._waiting, self._passing = waiting_bytes(everything, nodes), passing_bytes(everything, nodes)
        self._node_sizes = sorted(set(cluster.nodes))
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
        gathered, unreduced = whole * each.gathered, trained * each.unreduced
        one_slice, its_gradient = in_slices * each.gathered / slices, trained_in_slices * each.unreduced / slices
        gradients = unit.trainable * each.gradient
        slice_waiting = self._waiting_in_slices(unit, placement, trained_in_slices) if in_slices else 0.0
        optimizer = self._optimizer_seconds(unit, store)
        is_late = store is UnitStore.HOST and not is_root
        traffic = self._traffic.whole(
            store, gathered, trained * each.gradient, optimizer if is_late else 0.0, is_root=is_root
        )
        if in_slices:
            reduced = each.gradient * trained_in_slices / in_slices
            traffic += self._traffic.sliced(placement, unit.sliceable, each.gathered, reduced)
        send, work = self._phase_seconds(traffic, accumulates)
        states = unit.parameters * each.parameter + unit.trainable * (each.gradient + each.optimizer)
        # A copy that the ranks of a node map is as whole as one of each rank: nothing is gathered.
        is_mapped = self.cluster.computes_on_hosts and store.strategy.is_node_sharded
        is_whole, on_host = store is UnitStore.REPLICATE or is_mapped, store is UnitStore.HOST
        kept: dict[int, float] = {}
        for size in self._node_sizes:
            needed = 0.0 if on_host else states / self._share(store, size)
            if is_whole:
                needed += gathered if each.gathered != each.parameter else 0.0  # autocast's copy
            elif is_root:
                needed += gathered + unreduced
            else:
                # On hosts gradients of the optimizer come as gathered copies go. Half of them are counted: it has been
                # more than none of them (`benchmarks/memory.py`).
                come = gradients / 2 / self.cluster.world if self.cluster.computes_on_hosts else 0.0
                needed += max(0.0, gathered - come) if store is UnitStore.WORLD_KEPT else 0.0
                needed += gathered / size if store is UnitStore.WORLD_TO_NODE else 0.0
                needed += unreduced if accumulates and store.strategy.is_world_sharded else 0.0
            kept[size] = needed
        stays = is_whole or is_root or store is UnitStore.WORLD_KEPT
        # Where gathered copies stay, gradients come as these go (above). With several micro-batches whole ones are
        # kept meanwhile, and mixed placements have taken nearly all that is counted.
        comes = store.strategy.is_world_sharded and store is not UnitStore.WORLD_KEPT and not accumulates
        activations, recomputed = unit.activation_bytes, unit.flops if placement.checkpoint else 0.0
        with_holes = 1 + HOLES_OF_ACTIVATIONS if self.cluster.computes_on_hosts else 1
        if slices > 1 and unit.sliceable.loss_bytes is not None:
            # The logits of a slice, their exponentials, and their gradients; in the backward they are computed again.
            activations = max(0.0, activations - unit.sliceable.loss_bytes)
            activations += _SLICES_OF_LOGITS * unit.sliceable.logits_bytes / slices
            recomputed += unit.flops
        return UnitCost(
            placement,
            tuple(map(whole_nanoseconds, send)),
            tuple(map(whole_nanoseconds, work)),
            0 if is_late else whole_nanoseconds(optimizer),
            kept,
            math.ceil(states + (gathered if each.gathered != each.parameter else 0.0)) if on_host else 0,
            with_holes * (unit.input_bytes if placement.checkpoint else activations),
            recomputed,
            (
                math.ceil(one_slice + (0.0 if stays else gathered)),
                math.ceil(its_gradient + self._unreduced(store, unreduced, slice_waiting, is_whole, is_root)),
                math.ceil(with_holes * unit.activation_bytes) if placement.checkpoint else 0,
            ),
            {size: self._starting(unit, store, self._share(store, size)) for size in self._node_sizes},
            # FSDP2 makes them anew in each step. On devices they count throughout, as do those that are kept in place.
            gradients / self.cluster.world if self.cluster.computes_on_hosts and comes else 0.0,
        )

    def _starting(self, unit: UnitSize, store: UnitStore, share: int) -> float:
        """Bytes that are made of a unit at the start on a rank, while the script's own copy is still there."""
        each = self.model.state_bytes
        shard = unit.parameters * each.parameter / share if share > 1 else 0.0
        return shard + (0.0 if store.strategy.is_world_sharded else unit.trainable * each.gradient / share)

    def _unreduced(self, store: UnitStore, gradients: float, in_slices: float, is_whole: bool, is_root: bool) -> float:
        """Bytes of a unit's `Peak.UNREDUCED`, which on hosts counts twice: gradients, and the message of them."""
        if is_root and not is_whole and store is not UnitStore.HOST:
            # Its gradients are counted throughout, so it is the message alone.
            return gradients / 2 if self.cluster.computes_on_hosts else 0.0
        if store is UnitStore.HOST:
            # In the precision of the backward, and then bucket by bucket in that of the parameters. A slice is one.
            return (0.0 if is_root else gradients) + max(in_slices, self._waiting)
        if not is_whole:
            return gradients
        # Of all units of the store together: as if it had all of the model, so that it counts once.
        if store is UnitStore.REPLICATE or self._node_sizes[-1] == 1:
            return self._passing / 2 if self.cluster.computes_on_hosts else 0.0
        return self._waiting / 2

    def _waiting_in_slices(self, unit: UnitSize, placement: UnitPlacement, trained: int) -> float:
        """Bytes of gradients in slices that wait until they are copied to the host."""
        each, weights = self.model.state_bytes.gradient, unit.sliceable
        # Those of several weights never wait together. A weight that is in several products has one gradient added up.
        largest = min(trained, unit.largest_parameter or trained)
        added_up = largest if weights.backward > weights.parameters else 0
        return each * (min(WAITING_BUCKETS + 1, placement.slices) * largest / placement.slices + added_up)

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
            seconds = (profile.fixed_seconds / self._share(store, size) for profile, size in ranks)
            self._step_seconds[store] = max(seconds)
        return part * self._step_seconds[store]

    def _share(self, store: UnitStore, node_size: int) -> int:
        """The number of ranks that share one copy of a unit's states."""
        if store is UnitStore.REPLICATE:
            return 1
        return node_size if store.strategy.is_node_sharded else self.cluster.world


def whole_nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded up: no prediction is shortened."""
    return math.ceil(seconds * 1e9)
