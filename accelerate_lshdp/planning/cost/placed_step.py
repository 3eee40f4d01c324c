# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`predict_placed_step`: the step time of a model whose units are kept in different ways, unit by unit.

Every unit is written down as its store does it, by a `StepWriter` of the strategy that keeps all units so; all of them
write into one step. World-sharded units are gathered before they are computed, and reduced after their backward, while
all ranks wait. The gradients of other units travel beside the computing, in a lane of their own: where both are under
way, they share the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.documents.network import inside_all_gather
from accelerate_lshdp.documents.placement import UnitPlacement, UnitStore
from accelerate_lshdp.documents.strategy import Gathered
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, ModelSize
from accelerate_lshdp.planning.cost.step_prediction import StepPrediction
from accelerate_lshdp.planning.cost.step_writer import BACKWARD_SHARE, StepWriter


#: The lane of what travels beside the computing.
_BESIDE = 1


@dataclass(frozen=True)
class StoreCosts:
    """What the ranks and their nodes take where units are kept in one store.

    Args:
        profiles: one a rank; `fixed_seconds` is the optimizer step of all parameters, as far as this rank does it.
        cluster: nodes and network.
        load_seconds: measured seconds that sending all gradients during the backward adds to it. None: not measured.
    """

    profiles: Sequence[RankProfile]
    cluster: ClusterModel
    load_seconds: Sequence[float] | None = None


def predict_placed_step(
    placements: Sequence[UnitPlacement],
    root: UnitPlacement,
    micro_batches: Sequence[tuple[int, int]],
    model: ModelSize,
    costs: Mapping[UnitStore, StoreCosts],
    *,
    communication_dtype: str = "fp32",
    wire_bytes: float,
) -> StepPrediction:
    """Predicts one optimizer step.

    Args:
        placements: of the units, in the order of the forward.
        root: of what is in no unit.
        micro_batches: (size, accumulation steps) of each rank, the same number of steps on all of them.
        model: bytes of its parameters and gradients.
        costs: for each store that a unit or the root has.
        communication_dtype: format of gradients on the wire.
        wire_bytes: bytes of all gradients on the wire.

    Raises:
        ValueError: placements and units differ in number, numbers of micro-batches differ, a batch is larger than
            measured, or devices have streams, which fetch units ahead.
    """
    if len(placements) != len(model.unit_bytes):
        raise ValueError(f"found {len(placements)} placements of {len(model.unit_bytes)} units, expected one each")
    if len({steps for _, steps in micro_batches}) > 1:
        raise ValueError(f"found {list(micro_batches)}, expected the same number of micro-batches on all ranks")
    if any(own.cluster.streams for own in costs.values()):
        raise ValueError("found devices with streams, expected ranks that stop computing while a unit is gathered")
    writers: dict[UnitStore, StepWriter] = {}
    for store in dict.fromkeys(placement.store for placement in (root, *placements)):
        own = costs[store]
        writer = StepWriter(str(store.strategy), model, own.cluster, communication_dtype, wire_bytes)
        writer.describe_ranks(own.profiles, micro_batches, [1.0] * len(micro_batches), own.load_seconds)
        writers[store] = writer
    return _PlacedStep(placements, root, model, writers).predict()


class _PlacedStep:
    """One step into which the writers of several stores write."""

    def __init__(
        self,
        placements: Sequence[UnitPlacement],
        root: UnitPlacement,
        model: ModelSize,
        writers: Mapping[UnitStore, StepWriter],
    ) -> None:
        self.placements, self.root, self.model, self.writers = placements, root, model, writers
        self.step = writers[root.store]
        for writer in writers.values():
            writer.segments, writer.needs = self.step.segments, self.step.needs
            writer.exchanges, writer.transfers = self.step.exchanges, self.step.transfers
            writer.extra, writer.inside_bytes = self.step.extra, self.step.inside_bytes
            if writer.traits.overlaps:
                writer.lane = _BESIDE
        self.to_gradient = model.gradient_bytes / model.parameter_bytes
        self._share_out()

    def _share_out(self) -> None:
        """Sets the optimizer step and the load of sending: of each store the part that its units are of the model."""
        sizes = [*zip(self.placements, self.model.unit_bytes, strict=True), (self.root, self.model.root_bytes)]
        self.optimizer = np.zeros_like(self.step.time)
        load = np.zeros_like(self.step.time)
        for placement, size in sizes:
            writer, part = self.writers[placement.store], size / self.model.parameter_bytes
            self.optimizer += part * writer.optimizer
            load += part * writer.load
        self.loads = {store: writer.load.copy() for store, writer in self.writers.items()}
        self.step.optimizer, self.step.load = self.optimizer, load

    def predict(self) -> StepPrediction:
        """The seconds and bytes of the step."""
        step, root = self.step, self.model.root_bytes
        keeps_root = not self._is_gathered(self.root)
        steps = int(step.steps.max())
        gathered = steps if self._gathers_again(self.root) else 1
        packing = step._packing_seconds(root * (gathered + self.to_gradient), (gathered + 1) * float(bool(root)))
        place = step._add_segment(self.optimizer + step.overhead, extra=0.0 if keeps_root else packing)
        for micro_batch in range(steps):
            if root and not keeps_root and (micro_batch == 0 or self._gathers_again(self.root)):
                step._add_transfer(step.collectives.gather, root, place)
            place = self._forward(place, is_first=micro_batch == 0)
            place = self._backward(place, is_last=micro_batch == steps - 1)
        if root:
            # The parameters that the forward uses first: their gradients are ready last.
            payload = root * self.to_gradient * step.wire_share
            collective = step.collectives.all_reduce if keeps_root else step.collectives.reduce_scatter
            if self._travels(step):
                step._add_transfer(collective, payload, place)
        if step.converts and keeps_root:
            step._add_segment(np.zeros_like(step.time), extra=step._conversion_seconds(root * self.to_gradient))
        return step.simulate()

    def _units(self) -> list[tuple[UnitPlacement, StepWriter, float, float]]:
        """Of each unit its placement, writer and bytes, and its part of the computing."""
        whole = sum(self.model.unit_bytes)
        return [
            (placement, self.writers[placement.store], size, size / whole)
            for placement, size in zip(self.placements, self.model.unit_bytes, strict=True)
        ]

    def _forward(self, place: int, *, is_first: bool) -> int:
        needs = None
        for placement, writer, size, part in self._units():
            seconds = part * writer.time * (1 - BACKWARD_SHARE)
            if self._is_gathered(placement):
                gathers = is_first or self._gathers_again(placement)
                needs = writer._add_transfer(writer.collectives.gather, size, place) if gathers else needs
                # After it, units that keep the shards of their node copy these out of what was gathered.
                kept = size / writer.nodes[0] if placement.store.reshards_to_node else 0.0
                extra = writer._packing_seconds(size * gathers + kept, int(gathers))
            else:
                extra = writer._exposed_seconds(writer._intra_node_seconds(size), seconds)
            place = writer._add_segment(seconds, needs=needs, extra=extra)
        return place

    def _backward(self, place: int, *, is_last: bool) -> int:
        needs = None
        for placement, writer, size, part in reversed(self._units()):
            seconds = part * writer.time * (BACKWARD_SHARE + (1 - BACKWARD_SHARE) * placement.checkpoint)
            gradient = size * self.to_gradient
            if self._is_gathered(placement):
                needs, place = self._gathered_backward(placement, writer, size, seconds, place, needs, is_last)
                continue
            exchanged = writer._intra_node_seconds(size) + writer._intra_node_seconds(gradient)
            extra = 0.0
            if is_last:
                exchanged = exchanged + writer._sum_inside_seconds(gradient)
                # Compressed before it travels and decompressed after it.
                extra = 2 * writer._conversion_seconds(gradient)
                seconds = seconds + part * self.loads[placement.store]
            extra = extra + writer._exposed_seconds(exchanged, seconds)
            place = writer._add_segment(seconds, needs=needs, extra=extra)
            if is_last and self._travels(writer):
                writer._add_transfer(writer.collectives.all_reduce, gradient * writer.wire_share, place)
        return place

    def _gathered_backward(
        self,
        placement: UnitPlacement,
        writer: StepWriter,
        size: float,
        seconds: np.ndarray,
        place: int,
        needs: int | None,
        is_last: bool,
    ) -> tuple[int | None, int]:
        """The backward of a world-sharded unit: what the next segment needs, and the last segment."""
        gathers = self._gathers_again(placement)
        if gathers:
            gather = inside_all_gather if placement.store.reshards_to_node else writer.collectives.gather
            needs = writer._add_transfer(gather, size, place)
        extra = writer._packing_seconds(size * gathers, int(gathers))
        if is_last:
            gradient = size * self.to_gradient
            extra = extra + writer._packing_seconds(gradient) + 2 * writer._conversion_seconds(gradient)
        place = writer._add_segment(seconds, needs=needs, extra=extra)
        if is_last:
            payload = size * self.to_gradient * writer.wire_share
            reduced = writer._add_transfer(writer.collectives.reduce_scatter, payload, place)
            return (reduced if writer.blocks else None), place
        return needs, place

    @staticmethod
    def _travels(writer: StepWriter) -> bool:
        """Whether gradients travel after what a writer has summed inside the nodes."""
        return len(writer.nodes) > 1 or not (writer.shares_inside or writer.sums_inside)

    @staticmethod
    def _is_gathered(placement: UnitPlacement) -> bool:
        return placement.store.strategy.is_world_sharded

    @staticmethod
    def _gathers_again(placement: UnitPlacement) -> bool:
        return placement.store.strategy.traits.gathered is Gathered.EACH_PASS
