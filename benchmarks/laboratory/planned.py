# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is measured of a cluster before training, and what follows from it: batch sizes and predicted step times."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import mean
from typing import Any

from accelerate_lshdp.comparing.batch_sizes import plan_micro_batches
from accelerate_lshdp.comparing.cases import FULL_PRECISION, Case, equal_sizes, has_units
from accelerate_lshdp.comparing.placements import PlacedModel
from accelerate_lshdp.documents.cluster import Link, Node
from accelerate_lshdp.documents.collectives import collectives_of, group_sizes
from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.documents.network import LinkCost, ring_all_reduce
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement
from accelerate_lshdp.documents.profile import Profile
from accelerate_lshdp.documents.profile_sections import Network
from accelerate_lshdp.documents.strategy import strategy_traits
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, CommunicationCost, ModelSize
from accelerate_lshdp.planning.cost.placed_step import StoreCosts, predict_placed_step
from accelerate_lshdp.planning.cost.strategy_time import predict_step
from accelerate_lshdp.planning.cost.wire_sizes import reduction_bytes
from laboratory.shared_machine import Processors, simulate_under_quotas
from laboratory.speed_check import Speed


#: Of the emulated nodes' CPU quotas.
QUOTA_PERIOD_SECONDS = 0.02
#: What TCP carries of an Ethernet link's rate: 1460 bytes of 1538 in a frame, its gap and headers included. Streams
#: between emulated nodes reach 0.95 to 0.96.
GOODPUT = 1460 / 1538


@dataclass(frozen=True)
class Format:
    """What a format for gradients sends and takes.

    Args:
        wire_bytes: of all gradients of the model: an all-reduce of so many sends as much.
        communication_cost: CPU seconds of one core.
    """

    wire_bytes: float
    communication_cost: CommunicationCost


@dataclass(frozen=True)
class Overheads:
    """What FSDP2 takes of one core beside computing and sending (`overheads`).

    Args:
        sharding_seconds: of a forward and backward of the whole model whose units are gathered and reduced, with all
            messages.
        seconds_per_unit: of a unit that is gathered or reduced, whatever its size, with all messages.
        inside_seconds_per_byte: of a byte that ranks of a node send each other for it; 0: as for other bytes.
        optimizer_seconds: of an optimizer step, whose parameters are shards.
    """

    sharding_seconds: float = 0.0
    seconds_per_unit: float = 0.0
    inside_seconds_per_byte: float = 0.0
    optimizer_seconds: float = 0.0


@dataclass(frozen=True)
class ClusterMeasurements:
    """What was measured before training.

    Args:
        nodes: of the cluster.
        profile: of the ranks, at the nodes' speeds, for ``lsdp`` in full precision.
        networks: by name, each as described and as measured at the nodes' speeds.
        model: its size.
        formats: by name, those that the benchmark compares.
        shared_memory: whether node-sharded strategies use shared memory inside nodes.
        overheads, plain_overheads: of this package's processes and of plain PyTorch's.
        message_delay_seconds: on each network, what a message takes longer while ranks compute (`message_delay`).
        emulated_by_sleeping: ranks sleep to be slow, and no quota holds their nodes back.
    """

    nodes: Sequence[Node]
    profile: Profile
    networks: Mapping[str, tuple[Link, Network]]
    model: ModelSize
    formats: Mapping[str, Format]
    shared_memory: bool
    overheads: Overheads = Overheads()
    plain_overheads: Overheads = Overheads()
    message_delay_seconds: Mapping[str, float] = field(default_factory=dict)
    emulated_by_sleeping: bool = False

    def batches(self, case: Case, total: int, network: str) -> list[tuple[int, int]]:
        """The plan for a case: (micro-batch size, accumulation steps) of each rank.

        Raises:
            PlanningError: no plan is possible.
        """
        share = self.formats[case.communication_dtype].wire_bytes / self.model.gradient_bytes
        return plan_micro_batches(self.profile, total, self.networks[network][1].all_reduce, share)

    def check_micro_batches(self, total: int, *, planned: bool) -> tuple[list[int], list[float]]:
        """What ranks train when their speed is checked, and what that took them when they were profiled.

        Args:
            total: the global batch.
            planned: whether any case trains planned batches. Then these are checked, of the first network: all ranks
                take equally long, and they were rehearsed. Else, if all ranks have measured them, equal ones, as most
                cases train them: what is wrong with a rank's profile does not matter at the size that is checked.
        """
        sizes = list(equal_sizes(total, len(self.profile.ranks)))
        if planned or any(
            size > rank.time.batch_sizes[-1] for rank, size in zip(self.profile.ranks, sizes, strict=True)
        ):
            sizes = [size for size, _ in self.batches(Case("lshdp"), total, next(iter(self.networks)))]
        return sizes, [rank.time(size) for rank, size in zip(self.profile.ranks, sizes, strict=True)]

    def predicted_seconds(
        self,
        case: Case,
        micro_batches: Sequence[tuple[int, int]],
        network: str,
        speed: Speed,
        placements: tuple[Sequence[UnitPlacement], UnitPlacement] | None = None,
    ) -> float:
        """The step that the cost model predicts for a case on a network, at the ranks' speed at that time.

        Args:
            case: what is trained.
            micro_batches: (size, accumulation steps) of each rank.
            network: its name.
            speed: of the ranks.
            placements: of the model's units and of the rest of it. None: all are kept as the strategy says.

        Raises:
            ValueError: a micro-batch is larger than measured.
        """
        format = self.formats[case.communication_dtype]
        sent = {"communication_dtype": case.communication_dtype, "wire_bytes": format.wire_bytes}
        if placements is None:
            predicted = predict_step(
                case.strategy,
                self._profiles(case.strategy, speed),
                micro_batches,
                replace(self.model, ready_bytes=self.profile.bucket_bytes),
                self._cluster(case.strategy, format, network, speed),
                optimizer_shares=[1.0] * len(micro_batches),
                load_seconds=self._loads(case, speed),
                **sent,
            )
        else:
            units, root = placements
            costs = {}
            for store in {placement.store for placement in (*units, root)}:
                name, loads = str(store.strategy), self._loads(case, speed)
                costs[store] = StoreCosts(
                    self._profiles(name, speed), self._cluster(name, format, network, speed), loads
                )
            predicted = predict_placed_step(units, root, micro_batches, self.model, costs, **sent)
        # Ranks of the engine tell each other at the end of a backward what they measured: a small all-reduce.
        tells = not case.is_peer and len(self.nodes) > 1
        told = self.networks[network][1].all_reduce.latency_seconds if tells else 0.0
        return float(predicted.seconds + told)

    def plan_placement(
        self, placed: PlacedModel, share: float, micro_batches: Sequence[tuple[int, int]], network: str
    ) -> ModelPlacement:
        """The placement that is planned for a limit of memory; see `PlacedModel.plan`."""
        cost = self.formats[FULL_PRECISION].communication_cost
        per_byte = self.overheads.inside_seconds_per_byte or cost.seconds_per_byte
        # The ranks of a node share its processors, which do what links do elsewhere.
        inside = max(per_byte * node.ranks / node.cores for node in self.nodes)
        return placed.plan(
            share,
            micro_batches,
            self.profile.rank_profiles(),
            self._link(*self.networks[network]),
            LinkCost(0.0, inside),
            streams=False,
        )

    def _cluster(self, strategy: str, format: Format, network: str, speed: Speed) -> ClusterModel:
        """The nodes and a network as they are for the processes of a strategy."""
        is_plain, described, measured = strategy_traits(strategy).is_plain, *self.networks[network]
        communication_cost = self._under_load(format.communication_cost)
        if has_units(strategy):
            overheads = self.plain_overheads if is_plain else self.overheads
            communication_cost = replace(
                communication_cost,
                seconds_per_collective=0.0,  # it is in those of a unit
                seconds_per_unit=overheads.seconds_per_unit,
                inside_seconds_per_byte=overheads.inside_seconds_per_byte,
            )
            copied = self._copy_seconds_per_byte(is_plain, overheads.sharding_seconds, communication_cost)
            communication_cost = replace(communication_cost, copy_seconds_per_byte=copied)
        slowdowns = iter(speed.slowdowns)
        return ClusterModel(
            nodes=tuple(node.ranks for node in self.nodes),
            link=self._link(described, measured),
            communication_costs=tuple(
                communication_cost.on(node.cores / mean(islice(slowdowns, node.ranks))) for node in self.nodes
            ),
            shared_memory=self.shared_memory and not is_plain,
            message_delay_seconds=self.message_delay_seconds.get(network, 0.0),
            simulate=partial(simulate_under_quotas, processors=self._processors(speed)),
        )

    def _copy_seconds_per_byte(self, is_plain: bool, seconds: float, known: CommunicationCost) -> float:
        """What is left of sharding the whole model when messages and units are counted, for a byte of a unit.

        Each rank copies what was gathered out of a buffer, and gradients into one, all in new memory.

        Args:
            is_plain: whether plain PyTorch was measured.
            seconds: `Overheads.sharding_seconds`.
            known: CPU seconds of messages and units.
        """
        model, nodes = self.model, [node.ranks for node in self.nodes]
        collectives = collectives_of(strategy_traits("torch_fsdp" if is_plain else "fsdp"), nodes)
        # What is in no unit is not gathered again for the backward.
        gathered, count = model.parameter_bytes + sum(model.unit_bytes), len(model.unit_bytes)
        exchanges = collectives.gather(gathered, nodes), collectives.reduce_scatter(model.gradient_bytes, nodes)
        sent = 0.0
        for exchange in exchanges:
            inside = sum(exchange.inside_bytes or ())
            sent += (sum(exchange.handled_bytes) - inside) * known.seconds_per_byte
            sent += inside * known.seconds_per_byte_inside
        units = (3 * count + 2 * (model.root_bytes > 0)) * known.seconds_per_unit
        return max(0.0, seconds - sent / sum(nodes) - units) / (gathered + model.gradient_bytes)

    def _processors(self, speed: Speed) -> tuple[Processors, ...]:
        """Of each node: they share this machine, which may not have what all of them want together."""
        if self.emulated_by_sleeping:
            return tuple(Processors() for _ in self.nodes)
        machine = os.cpu_count() or 1
        is_crowded = sum(min(node.cores, node.ranks) for node in self.nodes) >= machine
        cores = iter(speed.cores if is_crowded else (0.0,) * len(speed.cores))
        return tuple(
            Processors.under_quota(
                node.cores, node.ranks, QUOTA_PERIOD_SECONDS, machine, sum(islice(cores, node.ranks))
            )
            for node in self.nodes
        )

    def _profiles(self, strategy: str, speed: Speed) -> list[RankProfile]:
        """The ranks at their speed, with the optimizer step that they do under a strategy.

        What sending takes of them is in the cluster's `communication_costs` and in `_loads`.
        """
        traits = strategy_traits(strategy)
        sizes = group_sizes(traits, [node.ranks for node in self.nodes])
        groups = [size for size, node in zip(sizes, self.nodes, strict=True) for _ in range(node.ranks)]
        cores = [node.cores / node.ranks for node in self.nodes for _ in range(node.ranks)]
        overheads = self.plain_overheads if traits.is_plain else self.overheads
        profiles = []
        for place, rank in enumerate(self.profile.ranks):
            slowdown = speed.slowdowns[place]
            # Plain PyTorch steps parameter by parameter, which its own check has measured.
            whole = speed.optimizer_seconds[place] if traits.is_plain else slowdown * rank.optimizer_seconds
            unwrapping = slowdown * overheads.optimizer_seconds / cores[place] if has_units(strategy) else 0.0
            seconds = whole / groups[place] + unwrapping
            slower = rank.slowed_down(slowdown)
            profiles.append(replace(slower, communication_load_seconds=0.0, optimizer_seconds=seconds).profile())
        return profiles

    def _loads(self, case: Case, speed: Speed) -> list[float]:
        """What sending adds to each rank's backward: as rehearsed in full precision, in proportion to its cost."""
        nodes = [node.ranks for node in self.nodes]
        ring = ring_all_reduce(1.0, nodes)

        def cost(name: str) -> float:
            format, count = self.formats[name], len(reduction_bytes(self.profile.bucket_bytes, name))
            handled = max(ring.handled_bytes) / max(nodes) * format.wire_bytes
            return (
                handled * format.communication_cost.seconds_per_byte
                + count * format.communication_cost.seconds_per_collective
            )

        exact = cost(FULL_PRECISION)
        share = cost(case.communication_dtype) / exact if exact > 0 else 1.0
        loads = [rank.communication_load_seconds for rank in self.profile.ranks]
        return [share * slowdown * load for slowdown, load in zip(speed.slowdowns, loads, strict=True)]

    def _under_load(self, communication_cost: CommunicationCost) -> CommunicationCost:
        """What communication takes while ranks compute.

        `communication_cost` was measured on ranks that did nothing else. The profile's rehearsed steps show what it
        takes beside computing, where both use the same caches: the ratio of the two holds for all exchanges.
        """
        nodes = [node.ranks for node in self.nodes]
        exact = self.formats[FULL_PRECISION].communication_cost
        collectives = collectives_of(strategy_traits(str(self.profile.strategy)), nodes)
        exchange = (collectives.all_reduce or ring_all_reduce)(self.model.gradient_bytes, nodes)
        count = len(self.profile.bucket_bytes)
        loads = iter(rank.communication_load_seconds for rank in self.profile.ranks)
        idle = loaded = 0.0
        for handled, node in zip(exchange.handled_bytes, self.nodes, strict=True):
            of_ranks = list(islice(loads, node.ranks))
            if min(of_ranks) > 0:  # else computing leaves some of the limit free, which sending takes unnoticed
                idle += handled * exact.seconds_per_byte + count * node.ranks * exact.seconds_per_collective
                loaded += sum(of_ranks) * node.cores / node.ranks
        ratio = max(1.0, loaded / idle) if idle > 0 else 1.0
        return replace(
            communication_cost,
            seconds_per_byte=ratio * communication_cost.seconds_per_byte,
            seconds_per_collective=ratio * communication_cost.seconds_per_collective,
            conversion_seconds_per_byte=ratio * communication_cost.conversion_seconds_per_byte,
        )

    def _link(self, described: Link, measured: Network) -> LinkCost:
        """As fast as an all-reduce between nodes that do nothing else: a ring does not reach the link's rate."""
        nodes = [node.ranks for node in self.nodes]
        link = LinkCost.from_rate(GOODPUT * described.bandwidth_bits_per_second, measured.ping_pong.latency_seconds)
        if len(nodes) < 2:
            return link
        ring = LinkCost.from_all_reduce(0.0, measured.all_reduce.seconds_per_byte, nodes)
        return LinkCost(link.latency_seconds, max(link.seconds_per_byte, ring.seconds_per_byte))


def read_formats(told: Sequence[Mapping[str, Any]], nodes: Sequence[int]) -> dict[str, Format]:
    """From what each rank told of each format (`rank.EmulatedRank.measure_formats`).

    Args:
        told: of each rank, by format: ``points`` ((bytes, CPU seconds)), the ``wire_share`` of those messages, and
            ``wire_bytes`` of the whole model.
        nodes: ranks on each node.
    """
    from accelerate_lshdp.profiling.communication_cost import fit_communication_cost

    def points(name: str) -> list[tuple[int, float]]:
        of_sizes = zip(*(rank[name]["points"] for rank in told), strict=True)
        return [(of_size[0][0], sum(seconds for _, seconds in of_size) / len(told)) for of_size in of_sizes]

    formats = {}
    for name, entry in told[0].items():
        lossy = None if name == "fp32" else points(name)
        communication_cost = fit_communication_cost(points("fp32"), nodes, lossy, entry["wire_share"])
        formats[name] = Format(entry["wire_bytes"], communication_cost)
    return formats
