# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Estimates of every strategy for one model on one cluster: memory, bytes sent, and seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from accelerate_lshdp.documents.collectives import group_sizes
from accelerate_lshdp.documents.host_memory import HOLES_OF_ACTIVATIONS
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.plan_sections import POWERSGD_RANK
from accelerate_lshdp.documents.strategy import STRATEGIES as ALL_STRATEGIES
from accelerate_lshdp.documents.strategy import SharedBy, strategy_traits
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.estimation.hardware import Hardware, NodeHardware
from accelerate_lshdp.estimation.model_measurement import MeasuredModel
from accelerate_lshdp.estimation.placement_estimate import host_state_bytes, placement_cluster, predicted_step
from accelerate_lshdp.planning import PlanningError, RankProfile, TimeCurve, plan_fixed_total
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, CommunicationCost, ModelSize
from accelerate_lshdp.planning.cost.memory import STATE_BYTES, RankMemory, rank_memory
from accelerate_lshdp.planning.cost.step_prediction import StepPrediction
from accelerate_lshdp.planning.cost.strategy_time import predict_step
from accelerate_lshdp.planning.placement.inputs import ModelSizes
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.placement.totals import plan_trainable


#: Of those whose units are all kept alike; the others are planned unit by unit (`PLANNED`).
STRATEGIES = tuple(name for name, traits in ALL_STRATEGIES.items() if not (traits.is_plain or traits.is_per_unit))
#: The strategy of which each unit has its own placement, and the format of its gradients that is estimated.
PLANNED, _PLANNED_FORMAT = "osdp", "fp32"
FORMATS = tuple(WIRE_FORMATS)
#: CPU seconds of gloo on one core: for a byte that is sent, received and added; for a collective. Chosen so that
#: predictions agree with steps of an emulated cluster, not measured by themselves; `profiling.communication_cost`
#: measures them.
_SOCKET_SECONDS_PER_BYTE, _COLLECTIVE_SECONDS = 1.2e-9, 0.5e-3
#: The link between host memory and a device, and between devices of one host: assumed to be PCIe 3.0 with 16 lanes.
_PCI_EXPRESS = LinkCost(20e-6, 1 / 12e9)
#: Bytes of the process itself: libraries in host memory, kernels and workspaces on a device. Assumed.
PROCESS_HOST_BYTES, PROCESS_DEVICE_BYTES = 400 * 2**20, 600 * 2**20
#: Usable fraction of memory; the rest is for fragments and temporary tensors, which no estimate sees.
_USABLE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The estimate of one strategy with one format of gradients.

    Args:
        strategy: one of `STRATEGIES`, or `PLANNED`.
        communication_dtype: one of `FORMATS`.
        micro_batches: (size, accumulation steps) of each rank; empty without a prediction.
        memory: memory of a rank of each node with its micro-batch; with one sample where there is no prediction. Empty
            where units differ.
        device_bytes: bytes on one device of each node, the process included; None: its ranks compute in host memory.
        host_bytes: bytes in the host memory of each node.
        prediction: the predicted step; None if it does not fit, or the global batch cannot be cut.
        problem: the reason why there is no prediction, or None.
        fits: whether memory suffices for one sample a rank.
        placement: where each unit goes, with its certificate; None: all as the strategy says.
    """

    strategy: str
    communication_dtype: str
    micro_batches: tuple[tuple[int, int], ...]
    memory: tuple[RankMemory, ...]
    device_bytes: tuple[float | None, ...]
    host_bytes: tuple[float, ...]
    prediction: StepPrediction | None
    problem: str | None
    fits: bool
    placement: PlacementResult | None = None

    @property
    def label(self) -> str:
        """Strategy and format."""
        return f"{self.strategy} {self.communication_dtype}"

    @property
    def batch_sizes(self) -> list[int]:
        """Samples of each rank."""
        return [size * steps for size, steps in self.micro_batches]


def formats_of(strategy: str, formats: Sequence[str] = FORMATS) -> list[str]:
    """The formats that a strategy's gradients can travel in."""
    world_sharded = strategy_traits(strategy).shared_by is SharedBy.WORLD
    return [name for name in formats if not (world_sharded and WIRE_FORMATS[name].between_nodes_only)]


def estimate_all(
    model: MeasuredModel,
    hardware: Hardware,
    total_batch_size: int,
    *,
    mixed_precision: str = "no",
    formats: Sequence[str] = FORMATS,
    profiles: Sequence[RankProfile] | None = None,
) -> list[Estimate]:
    """The estimates of all strategies in all formats that their gradients can travel in.

    Args:
        model: the model, measured on fake tensors.
        hardware: the nodes and their link.
        total_batch_size: samples in a global batch.
        mixed_precision: "no", "bf16" or "fp16".
        formats: formats of gradients to estimate.
        profiles: measured profile of each rank, with its optimizer step as `fixed_seconds`. None: estimated.

    Raises:
        ValueError: fewer samples than ranks, or another number of profiles.
    """
    world = sum(hardware.node_sizes)
    if total_batch_size < world:
        raise ValueError(f"found a global batch of {total_batch_size}, expected at least {world}, one sample a rank")
    if profiles is not None and len(profiles) != world:
        raise ValueError(f"found a profile of {len(profiles)} ranks, expected {world}, as many as the cluster has")
    estimates = [
        _Estimator(model, hardware, total_batch_size, mixed_precision, profiles, strategy, name).estimate()
        for strategy in STRATEGIES
        for name in formats_of(strategy, formats)
    ]
    if _PLANNED_FORMAT in formats:
        estimator = _Estimator(model, hardware, total_batch_size, mixed_precision, profiles, PLANNED, _PLANNED_FORMAT)
        estimates.append(estimator.estimate_placement())
    return estimates


def powersgd_bytes(matrices: Sequence[tuple[int, int]], rank: int = POWERSGD_RANK) -> float:
    """Bytes of a gradient on the wire under PowerSGD: two thin fp32 matrices for each matrix that they make smaller.

    Args:
        matrices: (rows, columns) of each trainable parameter.
        rank: rank of the approximation (Vogels et al., 2019).
    """
    return 4.0 * sum(min(rank * (rows + columns), rows * columns) for rows, columns in matrices)


class _Estimator:
    """Estimates one strategy with one format."""

    def __init__(
        self,
        model: MeasuredModel,
        hardware: Hardware,
        total: int,
        mixed_precision: str,
        profiles: Sequence[RankProfile] | None,
        strategy: str,
        communication_dtype: str,
    ) -> None:
        self.model, self.hardware, self.total, self.mixed_precision = model, hardware, total, mixed_precision
        self.profiles, self.strategy, self.dtype = profiles, strategy, communication_dtype
        self.traits = strategy_traits(strategy)
        self.accumulates = False

    def estimate(self) -> Estimate:
        # Accumulation needs memory of its own, which makes micro-batches smaller, so it is tried without first.
        for self.accumulates in (False, True):
            largest = [self._largest_micro_batch(node, index) for index, node in enumerate(self.hardware.nodes)]
            if min(largest) < 1:
                return self._misfit(largest.index(min(largest)))
            profiles = list(self._rank_profiles(largest))
            try:
                micro_batches = self._micro_batches(profiles)
            except PlanningError as error:
                return self._result([1] * len(self.hardware.nodes), (), None, f"no batch sizes: {error}", fits=True)
            if max(steps for _, steps in micro_batches) == 1:
                break
        prediction = predict_step(
            self.strategy,
            profiles,
            micro_batches,
            self._model_size(),
            self._cluster_model(),
            communication_dtype=self.dtype,
            wire_bytes=powersgd_bytes(self.model.matrices) if WIRE_FORMATS[self.dtype].wire_share is None else None,
        )
        first_ranks = [sum(self.hardware.node_sizes[:node]) for node in range(len(self.hardware.nodes))]
        samples = [
            max(size for size, _ in micro_batches[first : first + count])
            for first, count in zip(first_ranks, self.hardware.node_sizes, strict=True)
        ]
        return self._result(samples, tuple(micro_batches), prediction, None, fits=True)

    def estimate_placement(self) -> Estimate:
        """The estimate of the best placement of each unit; see `placement_estimate`."""
        hardware, model = self.hardware, ModelSizes.of(self.model.units)
        cluster = placement_cluster(
            hardware,
            tuple(self._rank_profiles([self.total] * len(hardware.nodes))),
            model.trainable,
            usable=_USABLE,
            process_bytes=PROCESS_DEVICE_BYTES,
            process_host_bytes=PROCESS_HOST_BYTES,
            one_core=CommunicationCost(_SOCKET_SECONDS_PER_BYTE, _COLLECTIVE_SECONDS),
            device_link=_PCI_EXPRESS,
        )
        try:
            result = plan_trainable(model, cluster, total_batch_size=self.total)
        except PlanningError as error:
            nothing: tuple[float, ...] = (0.0,) * len(hardware.nodes)
            devices = tuple(None if node.device is None else 0.0 for node in hardware.nodes)
            return Estimate(PLANNED, self.dtype, (), (), devices, nothing, None, str(error), fits=False)
        states, devices, hosts, first = host_state_bytes(result, model), [], [], 0
        for node in hardware.nodes:
            needs = result.predicted.memory_bytes[first : first + node.ranks]
            first += node.ranks
            devices.append(None if node.device is None else float(max(needs)))
            hosts.append(float(sum(needs)) if node.device is None else states + node.ranks * PROCESS_HOST_BYTES)
        step = predicted_step(result, model, cluster)
        return Estimate(
            PLANNED, self.dtype, result.micro_batches, (), tuple(devices), tuple(hosts), step, None, True, result
        )

    # Memory

    def _memory(self, samples: Sequence[int]) -> tuple[RankMemory, ...]:
        memory = rank_memory(
            self.strategy,
            self.model.counts,
            self.hardware.node_sizes,
            state_bytes=STATE_BYTES[self.mixed_precision],
            communication_dtype=self.dtype,
            accumulates=self.accumulates,
            computes_on_hosts=not self.hardware.has_devices,
        )
        return tuple(
            replace(rank, activations=self.model.activations(count))
            for rank, count in zip(memory, samples, strict=True)
        )

    def _needs(self, node: NodeHardware, rank: RankMemory) -> tuple[float | None, float]:
        """Bytes of one device of a node (None: it has none), and of the node's host."""
        if node.device is None:
            return None, node.ranks * (rank.total_bytes + PROCESS_HOST_BYTES)
        return rank.device_bytes + PROCESS_DEVICE_BYTES, node.ranks * (rank.host_bytes + PROCESS_HOST_BYTES)

    def _largest_micro_batch(self, node: NodeHardware, index: int) -> int:
        """The largest micro-batch, in samples, that a node's ranks have memory for."""
        empty = self._memory([0] * len(self.hardware.nodes))[index]
        device, host = self._needs(node, empty)
        each = self.model.activations(1)  # bytes; memory is linear in the samples
        rooms = []
        if device is not None and node.device.memory_bytes is not None:
            rooms.append((node.device.memory_bytes * _USABLE - device) / each)
        if node.memory_bytes is not None:
            room = node.memory_bytes * _USABLE - host
            if device is None:
                rooms.append(room / node.ranks / (each * (1 + HOLES_OF_ACTIVATIONS)))
            elif room < 0:
                return 0
        return int(min([self.total, *(max(0.0, room) for room in rooms)]))

    def _misfit(self, index: int) -> Estimate:
        node = self.hardware.nodes[index]
        device, host = self._needs(node, self._memory([1] * len(self.hardware.nodes))[index])
        problem = f"node {index} needs {host / 1e9:.3g} GB of host memory for one sample a rank"
        if device is not None and node.device.memory_bytes is not None and device > node.device.memory_bytes * _USABLE:
            problem = f"node {index} ({node.name}) needs {device / 1e9:.3g} GB on its device for one sample"
        return self._result([1] * len(self.hardware.nodes), (), None, problem, fits=False)

    def _result(
        self,
        samples: Sequence[int],
        micro_batches: tuple[tuple[int, int], ...],
        prediction: StepPrediction | None,
        problem: str | None,
        fits: bool,
    ) -> Estimate:
        memory = self._memory(samples)
        needs = [self._needs(node, rank) for node, rank in zip(self.hardware.nodes, memory, strict=True)]
        devices, hosts = zip(*needs, strict=True)
        return Estimate(self.strategy, self.dtype, micro_batches, memory, devices, hosts, prediction, problem, fits)

    # Time

    def _rank_profiles(self, largest: Sequence[int]) -> Iterator[RankProfile]:
        """The profile of each rank; its optimizer step is that of all parameters (`predict_step` takes a share)."""
        of_rank = [most for most, node in zip(largest, self.hardware.nodes, strict=True) for _ in range(node.ranks)]
        for rank, (node, most) in enumerate(zip(self.hardware.node_of_rank, of_rank, strict=True)):
            if self.profiles is not None:
                measured = self.profiles[rank]
                yield replace(measured, max_micro_batch_size=min(most, measured.max_micro_batch_size))
                continue
            # No constant part: kernels' launch times are unknown without a measurement.
            seconds = self.model.flops / node.rank_flops(self.mixed_precision)
            curve = TimeCurve((1, most), (seconds, most * seconds)) if most > 1 else TimeCurve((1,), (seconds,))
            optimizer = node.optimizer_seconds(self.model.counts.trainable, self.traits.is_offloaded)
            yield RankProfile(curve, most, fixed_seconds=optimizer)

    def _micro_batches(self, profiles: Sequence[RankProfile]) -> list[tuple[int, int]]:
        """(size, steps) of each rank: the best sizes for unequal strategies, else equal ones in few micro-batches."""
        if not self.traits.is_unequal:  # as if all ranks were the slowest one, with the least memory
            slowest = max(profiles, key=lambda profile: profile.time(1))
            most = min(profile.max_micro_batch_size for profile in profiles)
            profiles = [replace(slowest, max_micro_batch_size=most)] * len(profiles)
        accumulates = self.total > sum(profile.max_micro_batch_size for profile in profiles)
        plan = plan_fixed_total(
            profiles, self.total, allow_accumulation=accumulates, shard_groups=self._shard_groups()
        )
        return list(plan.micro_batches)

    def _shard_groups(self) -> list[list[int]]:
        """The ranks that share one copy of the parameters, group by group."""
        world = sum(self.hardware.node_sizes)
        size = group_sizes(self.traits, self.hardware.node_sizes)[0]
        return [list(range(first, first + size)) for first in range(0, world, size)]

    def _model_size(self) -> ModelSize:
        counts, each = self.model.counts, STATE_BYTES[self.mixed_precision]
        units = tuple(unit * each.gathered for unit in counts.units)
        # Gradients travel in fp32, whatever is computed with.
        return ModelSize(counts.parameters * each.gathered, counts.trainable * 4.0, units)

    def _cluster_model(self) -> ClusterModel:
        nodes, hardware = self.hardware.nodes, self.hardware
        one_core = CommunicationCost(
            _SOCKET_SECONDS_PER_BYTE, _COLLECTIVE_SECONDS, WIRE_FORMATS[self.dtype].conversion_seconds
        )
        has_devices = hardware.has_devices
        return ClusterModel(
            hardware.node_sizes,
            hardware.link,
            communication_costs=tuple(
                CommunicationCost() if node.device is not None else one_core.on(node.cores) for node in nodes
            ),
            inside=_PCI_EXPRESS if has_devices else None,
            device_link=_PCI_EXPRESS if has_devices else None,
            shared_memory=not has_devices,
            streams=has_devices,
        )
