# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The memory of a unit with each of its placements, without a batch.

A unit that is computed is gathered whole, but for weights in slices, of which there is one slice at a time; the
gathered copy of `world_kept` stays from the forward to the backward, and of `world_to_node` the node's shards do. The
root is gathered, and its gradient not reduced, from the first operation to the last, so both are counted throughout.
Where a step has several micro-batches, world-sharded units keep what is not in slices of their gradients between them.

Where ranks compute in host memory those of a node map one copy: nothing is gathered inside it, and gradients wait for
the ranks of the node that add theirs first. The terms are those of `planning.cost.memory`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from accelerate_lshdp.documents.bucket_sizes import WAITING_BUCKETS
from accelerate_lshdp.documents.host_memory import HOLES_OF_ACTIVATIONS
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.documents.step_memory import stepping_bytes
from accelerate_lshdp.planning.cost.memory import passing_bytes, waiting_bytes
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster, UnitSize


#: Tensors of the size of one slice's logits that a head in slices has at a time.
_SLICES_OF_LOGITS = 3


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """What only the root has where the forward ends and after that, in bytes.

    Args:
        unreduced: of its `Peak.UNREDUCED`: the only ones of all units when the backward begins.
        at_loss: of one sample, what is there beside activations when the backward begins.
        passed: of one sample, of the activations those that are free before the backward of the units.
        held: of one sample, what a script holds until the next forward has returned.
        message: of all its gradients, of which they are reduced before the optimizer steps: what is more than that
            step needs.
    """

    unreduced: float = 0.0
    at_loss: float = 0.0
    passed: float = 0.0
    held: float = 0.0
    message: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """The bytes that one placement of a unit takes.

    Args:
        state_bytes: throughout a step on a rank of each node size, without activations; what comes and what goes in a
            backward is in it, as if it was always there.
        coming_bytes: of `state_bytes` on a rank of each node size those that only come in the unit's backward.
        going_bytes: of them those that go then.
        host_bytes: on each host.
        sample_bytes: of one sample, kept for the backward.
        peaks: of each `Peak`, recomputed ones for each sample.
        start_bytes: at the start on a rank of each node size, beside the whole model.
        head: what only the root has.
    """

    state_bytes: dict[int, float]
    coming_bytes: dict[int, float]
    going_bytes: dict[int, float]
    host_bytes: int
    sample_bytes: float
    peaks: tuple[int, int, int]
    start_bytes: dict[int, float]
    head: HeadMemory

    def throughout(self, samples: int, node_size: int) -> float:
        """Bytes throughout a step with a micro-batch of some samples."""
        activations = samples * self.sample_bytes
        # Half of the activations: some exist only in the backward.
        return self.state_bytes[node_size] + activations - min(self.coming_bytes[node_size], activations / 2)

    def at_loss(self, samples: int, node_size: int) -> float:
        """Bytes when the forward ends and the backward begins."""
        activations = samples * (self.sample_bytes + self.head.at_loss)
        return self.state_bytes[node_size] - self.coming_bytes[node_size] + self.head.unreduced + activations

    def in_backward(self, samples: int, node_size: int) -> float:
        """Bytes at any moment of the units' backward: what goes in this unit's, or what comes, is there."""
        comes, goes = self.coming_bytes[node_size], self.going_bytes[node_size]
        activations = samples * (self.sample_bytes - self.head.passed)
        kept = self.state_bytes[node_size] - comes - goes + samples * self.head.held
        return kept + max(activations + goes, comes)

    def in_step(self, samples: int, node_size: int) -> float:
        """Bytes when the root's gradients are reduced, and when the optimizer steps."""
        kept = self.state_bytes[node_size] - self.going_bytes[node_size]
        return kept + self.head.message + samples * self.head.held


@dataclass(frozen=True, slots=True)
class _Weights:
    """Bytes of a unit's parameters, and of their gradients before they are reduced: of those that are not in slices.

    Args:
        gathered: of the parameters in the precision of the forward.
        unreduced: of the gradients in the precision of the backward.
        slice: of one slice of the others.
        slice_unreduced: of its gradient.
        slices_waiting: of gradients in slices that wait until they are copied to the host.
    """

    gathered: float
    unreduced: float
    slice: float = 0.0
    slice_unreduced: float = 0.0
    slices_waiting: float = 0.0


class MemoryOf:
    """Computes the memory of units on a cluster.

    Args:
        model: sizes of all units.
        cluster: ranks and links.
    """

    def __init__(self, model: ModelSizes, cluster: PlacementCluster) -> None:
        self.model, self.cluster = model, cluster
        #: Whether rows of memory are those of single moments of a step, not of one at which everything is there.
        self.knows_moments = cluster.streams and not cluster.counts_states_alone and model.head is not None
        # What the bytes of each unit need of all of them.
        everything, nodes = model.trainable * model.state_bytes.gradient, len(cluster.nodes)
        self._waiting, self._passing = waiting_bytes(everything, nodes), passing_bytes(everything, nodes)
        self._node_sizes = sorted(set(cluster.nodes))
        parameter = model.state_bytes.parameter
        self._stepping = stepping_bytes(parameter * model.trainable, parameter * model.largest_parameter)

    def unit(self, unit: UnitSize, placement: UnitPlacement, accumulates: bool) -> UnitMemory:
        """The memory of one placement.

        Args:
            unit: of the model.
            placement: of it.
            accumulates: a step has several micro-batches.
        """
        each, store = self.model.state_bytes, placement.store
        on_hosts, is_root = self.cluster.computes_on_hosts, unit is self.model.root
        is_whole, on_host = self._is_whole(store), store is UnitStore.HOST
        weights, casts = self._weights(unit, placement), each.gathered != each.parameter
        states = unit.parameters * each.parameter + unit.trainable * (each.gradient + each.optimizer)
        gradients = unit.trainable * each.gradient
        kept: dict[int, float] = {}
        coming: dict[int, float] = {}
        going: dict[int, float] = {}
        for size in self._node_sizes:
            share = self.share(store, size)
            kept[size], going[size] = 0.0 if on_host else states / share, 0.0
            if is_whole:
                kept[size] += weights.gathered if casts else 0.0  # autocast's copy
            elif is_root:
                kept[size] += weights.gathered + weights.unreduced
            else:
                going[size] = self._kept_gathered(store, weights.gathered, gradients, size)
                kept[size] += going[size]
                kept[size] += weights.unreduced if accumulates and store.strategy.is_world_sharded else 0.0
            # FSDP2 makes gradients anew in each step. With several micro-batches whole ones are kept meanwhile, and
            # mixed placements have taken nearly all that is counted. Where hosts compute, gradients come as gathered
            # copies go that stay (`_kept_gathered`).
            comes = not (accumulates or is_whole or on_host or (on_hosts and store is UnitStore.WORLD_KEPT))
            coming[size] = gradients / share if comes and (on_hosts or self.knows_moments) else 0.0
        activations, logits = self._activations(unit, placement)
        with_holes = 1 + HOLES_OF_ACTIVATIONS if on_hosts else 1
        unreduced = math.ceil(weights.slice_unreduced + self._unreduced(unit, store, weights))
        return UnitMemory(
            kept,
            coming,
            going,
            math.ceil(states + (weights.gathered if casts else 0.0)) if on_host else 0,
            with_holes * (unit.input_bytes if placement.checkpoint else activations),
            (
                math.ceil(weights.slice + self._gathered_at_a_time(store, weights.gathered, is_root)),
                unreduced,
                math.ceil(with_holes * unit.activation_bytes) if placement.checkpoint else 0,
            ),
            {size: self._starting(unit, store, self.share(store, size)) for size in self._node_sizes},
            self._head(unit, store, activations, logits, unreduced)
            if is_root and self.knows_moments
            else HeadMemory(),
        )

    def share(self, store: UnitStore, node_size: int) -> int:
        """The number of ranks that share one copy of a unit's states."""
        if store is UnitStore.REPLICATE:
            return 1
        return node_size if store.strategy.is_node_sharded else self.cluster.world

    def _is_whole(self, store: UnitStore) -> bool:
        # A copy that the ranks of a node map is as whole as one of each rank: nothing is gathered.
        return store is UnitStore.REPLICATE or (self.cluster.computes_on_hosts and store.strategy.is_node_sharded)

    def _weights(self, unit: UnitSize, placement: UnitPlacement) -> _Weights:
        each, slices = self.model.state_bytes, placement.slices
        in_slices = unit.sliceable.parameters if slices > 1 else 0
        whole = unit.parameters - in_slices
        # Which of them are frozen is not known: so that no sum is too small, as many as can be are trained.
        trained, trained_in_slices = min(whole, unit.trainable), min(in_slices, unit.trainable)
        if not in_slices:
            return _Weights(whole * each.gathered, trained * each.unreduced)
        # Those of several weights never wait together. A weight that is in several products has one gradient added up.
        largest = min(trained_in_slices, unit.largest_parameter or trained_in_slices)
        added_up = largest if unit.sliceable.backward > unit.sliceable.parameters else 0
        return _Weights(
            whole * each.gathered,
            trained * each.unreduced,
            in_slices * each.gathered / slices,
            trained_in_slices * each.unreduced / slices,
            each.gradient * (min(WAITING_BUCKETS + 1, slices) * largest / slices + added_up),
        )

    def _kept_gathered(self, store: UnitStore, gathered: float, gradients: float, node_size: int) -> float:
        """Bytes of gathered parameters that stay from the forward to the backward."""
        if store is UnitStore.WORLD_KEPT:
            # On hosts gradients of the optimizer come as gathered copies go. Half of them are counted: it has been
            # more than none of them (`benchmarks/memory.py`).
            come = gradients / 2 / self.cluster.world if self.cluster.computes_on_hosts else 0.0
            return max(0.0, gathered - come)
        return gathered / node_size if store is UnitStore.WORLD_TO_NODE else 0.0

    def _gathered_at_a_time(self, store: UnitStore, gathered: float, is_root: bool) -> float:
        """Bytes of a unit's `Peak.GATHERED`, which counts twice, without what is in slices."""
        if self._is_whole(store) or is_root:
            return 0.0
        if store is UnitStore.WORLD_KEPT:
            # On devices the message of which the copy is made that stays, once.
            return gathered / 2 if self.knows_moments else 0.0
        return gathered

    def _activations(self, unit: UnitSize, placement: UnitPlacement) -> tuple[float, float]:
        """Bytes of one sample that are kept without recomputing; and of logits that exist slice by slice alone."""
        activations, weights = unit.activation_bytes, unit.sliceable
        if placement.slices == 1 or weights.loss_bytes is None:
            return activations, 0.0
        # The logits of a slice, their exponentials, and their gradients; in the backward they are computed again.
        activations = max(0.0, activations - weights.loss_bytes)
        return activations + _SLICES_OF_LOGITS * weights.logits_bytes / placement.slices, weights.logits_bytes

    def _head(
        self, root: UnitSize, store: UnitStore, activations: float, logits: float, unreduced: float
    ) -> HeadMemory:
        """What the root has beside its activations.

        Args:
            root: its sizes.
            store: where its parameters are.
            activations: of a sample, as they are counted.
            logits: bytes of a sample's logits that are no output, as the head computes them slice by slice.
            unreduced: its gradients before they are reduced.
        """
        head, of_logits = self.model.head, self.model.working_of_logits
        own, held = max(0.0, head.own_output_bytes - logits), max(0.0, head.output_bytes - logits)
        # The outputs of the forward before are held until this one returns, before its backward works on anything.
        before = max(0.0, held - head.working_bytes)
        units_have = self.model.root.activation_bytes - of_logits - head.kept_bytes
        is_reduced_whole = not self._is_whole(store) and store is not UnitStore.HOST
        message = root.trainable * self.model.state_bytes.gradient if is_reduced_whole else 0.0
        passed = activations - max(0.0, units_have)
        return HeadMemory(unreduced, own + before, passed, held, max(0.0, message - self._stepping))

    def _starting(self, unit: UnitSize, store: UnitStore, share: int) -> float:
        """Bytes that are made of a unit at the start on a rank, while the script's own copy is still there."""
        each = self.model.state_bytes
        shard = unit.parameters * each.parameter / share if share > 1 else 0.0
        return shard + (0.0 if store.strategy.is_world_sharded else unit.trainable * each.gradient / share)

    def _unreduced(self, unit: UnitSize, store: UnitStore, weights: _Weights) -> float:
        """Bytes of a unit's `Peak.UNREDUCED`, which on hosts counts twice: gradients, and the message of them."""
        on_hosts, is_root = self.cluster.computes_on_hosts, unit is self.model.root
        is_whole = self._is_whole(store)
        if is_root and not is_whole and store is not UnitStore.HOST:
            # Its gradients are counted throughout, so it is the message alone.
            return weights.unreduced / 2 if on_hosts else 0.0
        if store is UnitStore.HOST:
            # In the precision of the backward, and then bucket by bucket in that of the parameters. A slice is one.
            return (0.0 if is_root else weights.unreduced) + max(weights.slices_waiting, self._waiting)
        if not is_whole:
            # On devices FSDP2 keeps the message of the unit before until that of this one is made, in the precision of
            # the optimizer's gradients.
            each = self.model.state_bytes
            message = weights.unreduced / each.unreduced * each.gradient
            return weights.unreduced + (message if self.knows_moments else 0.0)
        # Of all units of the store together: as if it had all of the model, so that it counts once.
        if store is UnitStore.REPLICATE or self._node_sizes[-1] == 1:
            # On devices the gradient of one parameter, before it is added to its bucket.
            of_parameter = unit.largest_parameter * self.model.state_bytes.unreduced if self.knows_moments else 0.0
            return self._passing / 2 if on_hosts else of_parameter
        return self._waiting / 2
