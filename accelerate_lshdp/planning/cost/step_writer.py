# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`StepWriter`: one training step under any strategy, written down as segments of computing and transfers.

* Replicated and node-sharded strategies: gradients travel bucket by bucket while the backward goes on.
* World-sharded strategies: each unit is gathered before it is computed and its gradient reduced after its backward. On
  devices without streams all ranks wait for each of these exchanges; with streams the next unit is gathered while the
  one before it is computed.

A step begins with the optimizer step of the one before: at that moment all ranks are level.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from accelerate_lshdp.documents.collectives import collectives_of, group_sizes
from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.documents.network import Collective, Exchange
from accelerate_lshdp.documents.strategy import Gathered, SharedBy, strategy_traits
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, ModelSize
from accelerate_lshdp.planning.cost.step_prediction import RankStep, StepPrediction
from accelerate_lshdp.planning.cost.step_simulation import Segment, Transfer
from accelerate_lshdp.planning.cost.wire_sizes import BUCKET_BYTES, reduction_bytes


#: The backward takes about two thirds of a micro-batch: it multiplies matrices twice as often as the forward.
BACKWARD_SHARE = 2 / 3
#: Bytes of torch DDP's buckets; the first one is small, so that communication begins early in the backward.
_TORCH_FIRST_BUCKET, _TORCH_BUCKET = 2**20, 25 * 2**20
#: What copying through shared memory takes of what sending through a socket does. Assumed, not measured.
_SHARED_MEMORY_SHARE = 0.1


class StepWriter:
    """Writes one training step as segments and transfers: `describe_ranks`, a ``write_`` method, `simulate`.

    Arrays are float64 with one entry a rank, in seconds, unless a comment says otherwise.

    Args:
        strategy: one of `documents.strategy.STRATEGIES`.
        model: its parameters and gradients, in bytes.
        cluster: nodes and network.
        communication_dtype: format of gradients on the wire.
        wire_bytes: bytes of all gradients of a step on the wire.
    """

    def __init__(
        self, strategy: str, model: ModelSize, cluster: ClusterModel, communication_dtype: str, wire_bytes: float
    ) -> None:
        self.traits, self.model, self.cluster = strategy_traits(strategy), model, cluster
        self.nodes = cluster.nodes
        self.collectives = collectives_of(self.traits, self.nodes, communication_dtype, cluster.two_stage)
        self.communication_dtype = communication_dtype
        # Bytes on the wire for each byte of a gradient in fp32.
        self.wire_share = wire_bytes / model.gradient_bytes if model.gradient_bytes else 0.0
        # One node sends nothing, so nothing is compressed.
        self.converts = communication_dtype != "fp32" and len(self.nodes) > 1
        # Index of each rank's node; `group`: ranks that share the copy of the parameters that the rank uses.
        self.node_of_rank = np.repeat(np.arange(len(self.nodes)), self.nodes)
        self.group = np.array(group_sizes(self.traits, self.nodes))[self.node_of_rank]
        self.shares_inside = self.traits.shared_by is SharedBy.NODE and self.group.max() > 1
        # Our whole copies are summed inside each node before they travel, and plain ones in one ring over all ranks.
        copies = self.traits.shared_by is not SharedBy.WORLD and not self.shares_inside and not self.traits.is_plain
        self.sums_inside = copies and max(self.nodes) > 1
        self.in_memory = (self.shares_inside or self.sums_inside) and cluster.shared_memory
        # Every device copies whole units from its node's copy in host memory, and gradients to it.
        self.is_streamed = (
            self.traits.is_offloaded and self.traits.shared_by is SharedBy.NODE and cluster.device_link is not None
        )
        # Whether computing stops for every exchange: world-sharded strategies on devices without streams.
        self.blocks = not (self.traits.overlaps or cluster.streams)
        # FSDP2 works on units whatever the size of its groups; the engine uses it where ranks share a copy.
        plain_units = self.traits.is_plain and self.traits.shared_by is SharedBy.NODE
        self.has_units = (
            self.traits.shared_by is SharedBy.WORLD or plain_units or (self.shares_inside and not self.in_memory)
        )
        self.unit_count = len(model.unit_bytes) + (1 if model.root_bytes else 0)
        self.segments: list[np.ndarray] = []
        self.needs: list[int | None] = []  # of each segment: the transfer that has to be complete before it
        # An exchange in two stages is one entry here and two among the transfers.
        self.exchanges: list[Exchange] = []
        self.transfers: list[Transfer] = []
        self.lane = 0  # in which its transfers go one after the other
        self.extra = np.zeros(len(self.group))  # seconds that are neither computing nor the optimizer
        self.inside_bytes = np.zeros(len(self.nodes))  # one entry a node

    # Ranks

    def describe_ranks(
        self,
        profiles: Sequence[RankProfile],
        micro_batches: Sequence[tuple[int, int]],
        optimizer_shares: Sequence[float] | None,
        load_seconds: Sequence[float] | None,
    ) -> None:
        """Sets the seconds of each rank from its profile; the arguments are those of `predict_step`."""
        # A rank updates its shard only, and the step of an element-wise optimizer is linear in the parameters.
        shares = 1 / self.group if optimizer_shares is None else np.array(optimizer_shares, dtype=float)
        self.optimizer = np.array([profile.fixed_seconds for profile in profiles]) * shares
        self.time = np.array([p.time(m) for p, (m, _) in zip(profiles, micro_batches, strict=True)])
        if self.is_streamed:
            # The host steps units while the forward computes those before them. What is in no unit comes first.
            first = self.optimizer * (self.model.root_bytes / self.model.parameter_bytes)
            self.optimizer = np.maximum(first, self.optimizer - self.time * (1 - BACKWARD_SHARE))
        # A load was measured in steps that send during the backward: other steps have no use for it.
        self.load_is_known = load_seconds is not None and self.traits.overlaps and len(self.nodes) > 1
        self.load = np.array(load_seconds, dtype=float) if self.load_is_known else np.zeros(len(self.time))
        self.steps = np.array([steps for _, steps in micro_batches])
        # Every micro-batch but the first adds its gradients to those that are there.
        self.overhead = (self.steps - 1) * np.array([p.accumulation_overhead_seconds for p in profiles])
        self.readiness = [
            self._readiness(profile, size, time, load)
            for profile, (size, _), time, load in zip(
                profiles, micro_batches, self.time.tolist(), self.load.tolist(), strict=True
            )
        ]

    def _readiness(self, profile: RankProfile, size: int, time: float, load: float) -> tuple[list[float], list[float]]:
        """The points of a curve: shares of the gradient (0 to 1), and the seconds at which each share is ready.

        The curve is linear between the points. `load` seconds are added to the backward, evenly.
        """
        forward, ready_bytes = time * (1 - BACKWARD_SHARE), self.model.ready_bytes
        if not ready_bytes or not profile.bucket_ready:
            return [0.0, 1.0], [forward, time + load]
        if len(ready_bytes) != len(profile.bucket_ready):
            raise ValueError(
                f"found {len(ready_bytes)} ready_bytes for {len(profile.bucket_ready)} curves of readiness, expected"
                " one for each"
            )
        sums = list(accumulate(ready_bytes))
        # Curves are measured apart from each other: none may end after the micro-batch that it is part of.
        times = [min(curve(size), time) for curve in profile.bucket_ready]
        # No gradient exists before the backward begins; a bucket that is ready earlier says when it does.
        begin = min(forward, times[0])
        stretch = (time + load - begin) / (time - begin) if time > begin else 1.0
        return [0.0, *(value / sums[-1] for value in sums)], [begin, *(begin + (t - begin) * stretch for t in times)]

    def _ready_seconds(self, share: float) -> np.ndarray:
        """Seconds from the start of the last micro-batch until each rank has this share of its gradient."""
        return np.array([np.interp(share, shares, times) for shares, times in self.readiness])

    # Parts of a step

    def _add_segment(self, seconds: np.ndarray, needs: int | None = None, extra: np.ndarray | float = 0.0) -> int:
        """Adds a segment of computing; returns its index.

        Args:
            seconds: of each rank: the part that is forward, backward or optimizer.
            needs: index of the transfer that has to be complete before the segment begins.
            extra: of each rank: the part that is exchange inside the node or conversion of gradients.
        """
        self.extra += extra
        whole = seconds + extra
        if self.shares_inside and not self.in_memory:
            # A collective inside the node ends on all its ranks at once: with the slowest of them.
            slowest = [whole[self.node_of_rank == node].max() for node in range(len(self.nodes))]
            whole = np.array(slowest)[self.node_of_rank]
        self.segments.append(whole)
        self.needs.append(needs)
        return len(self.segments) - 1

    def _add_transfer(self, collective: Collective, payload: float, after: int) -> int | None:
        """Adds an exchange between nodes; returns the index of its last transfer, None where a single rank trains.

        Args:
            collective: how the payload is exchanged.
            payload: bytes.
            after: index of the segment that all ranks have to finish before it begins.
        """
        if len(self.group) == 1:
            return None
        exchange = collective(payload, self.nodes)
        self.inside_bytes += np.array(exchange.handled_bytes) - np.array(exchange.sent_bytes)
        self.exchanges.append(exchange)
        inside = np.array(exchange.inside_bytes or (0.0,) * len(self.nodes))
        loads = self._processor_seconds(np.array(exchange.handled_bytes) - inside)
        # Where computing goes on, each message may wait for a processor; where it stops, none does.
        beside = 0.0 if self.blocks else exchange.rounds * self.cluster.message_delay_seconds
        between, within = exchange.seconds(self.cluster.link), self._intra_node_wire_seconds(exchange)
        # In one stage both links are used at the same time, so the slower one counts. In two stages the part inside
        # the node is a transfer of its own, which begins when the first one is complete.
        wire = between if inside.any() else max(between, within)
        seconds = self._device_copy_seconds(payload) + wire
        self.transfers.append(Transfer(seconds, loads, after, beside, self.lane))
        if inside.any():
            self.transfers.append(
                Transfer(within, self._processor_seconds(inside, inside=True), after, 0.0, self.lane)
            )
        return len(self.transfers) - 1

    def _intra_node_wire_seconds(self, exchange: Exchange) -> float:
        """Seconds of an exchange on the links inside the nodes; 0 where processors do that work."""
        if self.cluster.inside is None:
            return 0.0
        sizes = zip(exchange.handled_bytes, exchange.sent_bytes, self.nodes, strict=True)
        busy = [((handled - sent) / ranks, ranks - 1) for handled, sent, ranks in sizes if handled > sent]
        return max((self.cluster.inside.seconds(size, rounds) for size, rounds in busy), default=0.0)

    def _device_copy_seconds(self, payload: float) -> float:
        """Seconds of copying a rank's shard of `payload` bytes between the host, which has the copy, and its device.

        Node-sharded strategies have it counted in `_intra_node_seconds`.
        """
        link = self.cluster.device_link
        if link is None or not (self.traits.is_offloaded and self.traits.shared_by is SharedBy.WORLD):
            return 0.0
        return link.seconds(payload / len(self.group))

    def _processor_seconds(self, handled_bytes: np.ndarray, inside: bool = False) -> tuple[float, ...]:
        """Seconds that a collective takes of the processors of each node.

        0 where `load_seconds` were measured: they are part of the segments already.
        """
        if self.load_is_known:
            return (0.0,) * len(self.nodes)
        # A bucket that lies in a node's shared memory, or that the node has summed, is sent by one rank of the node.
        ranks = [1] * len(self.nodes) if self.in_memory or self.sums_inside else self.nodes
        return tuple(
            float(
                handled * (own.seconds_per_byte_inside if inside else own.seconds_per_byte)
                + count * own.seconds_per_collective
            )
            for handled, own, count in zip(handled_bytes, self.cluster.communication_costs, ranks, strict=True)
        )

    def _packing_seconds(self, payload: float, units: float = 1) -> np.ndarray:
        """Seconds of each rank for preparing `units` exchanges and copying `payload` bytes of their buffers."""
        costs = [
            payload * own.copy_seconds_per_byte + units * own.seconds_per_unit
            for own in self.cluster.communication_costs
        ]
        # All ranks of a node do it at once on the node's processors, hence times the number of ranks.
        return (np.array(costs) * np.array(self.nodes))[self.node_of_rank] * float(self.has_units)

    def _intra_node_seconds(self, payload: float, times: np.ndarray | int = 1, units: float = 1) -> np.ndarray:
        """Seconds of each rank for one all-gather or reduce-scatter of `payload` bytes inside its node.

        Where the node's copy is in host memory, each rank copies all of it between host and device, and gathers
        nothing.

        Args:
            payload: bytes of the whole copy that is gathered or reduced.
            times: how many such exchanges `inside_bytes` counts; the seconds returned are those of one.
            units: number of units that the exchange is made of.
        """
        seconds = self._packing_seconds(payload, units)
        if self.is_streamed:
            return seconds + self.cluster.device_link.seconds(payload)
        if not self.shares_inside:
            return seconds
        rounds = np.broadcast_to(times, len(self.group))
        for node, count in enumerate(self.nodes):
            ranks = self.node_of_rank == node
            handled, own, link = (count - 1) * payload, self.cluster.communication_costs[node], self.cluster.inside
            if self.in_memory:
                # No bytes are counted: ranks read and write one mapping, and nothing goes through a socket.
                seconds[ranks] += _SHARED_MEMORY_SHARE * handled * own.seconds_per_byte
                continue
            # Ranks of a node have equal numbers of micro-batches, so the largest number is that of each of them.
            self.inside_bytes[node] += rounds[ranks].max() * handled
            wire = link.seconds((count - 1) / count * payload, count - 1) if link is not None else 0.0
            seconds[ranks] += max(handled * own.seconds_per_byte_inside + count * own.seconds_per_collective, wire)
        return seconds

    def _sum_inside_seconds(self, payload: float) -> np.ndarray:
        """Seconds of each rank for summing `payload` bytes of whole gradients inside its node and getting the sum."""
        seconds = np.zeros(len(self.group))
        for node, count in enumerate(self.nodes if self.sums_inside else ()):
            ranks = self.node_of_rank == node
            # To one rank and back: all others send theirs, and get the sum.
            handled, own, link = 2 * (count - 1) * payload, self.cluster.communication_costs[node], self.cluster.inside
            if self.in_memory:
                seconds[ranks] = _SHARED_MEMORY_SHARE * handled * own.seconds_per_byte
            elif count > 1:
                self.inside_bytes[node] += handled
                wire = link.seconds(2 * payload, 2) if link is not None else 0.0
                taken = handled * own.seconds_per_byte_inside + 2 * count * own.seconds_per_collective
                seconds[ranks] = max(taken, wire)
        return seconds

    def _exposed_seconds(self, exchange: np.ndarray, compute: np.ndarray) -> np.ndarray:
        """Seconds that an exchange adds to computing: all of it, or with streams what computing does not hide."""
        return np.maximum(0.0, exchange - compute) if self.cluster.streams else exchange

    def _conversion_seconds(self, gradient_bytes: float) -> np.ndarray:
        """Seconds of each rank for compressing `gradient_bytes` of fp32; decompressing them takes as long."""
        costs = np.array([cost.conversion_seconds_per_byte for cost in self.cluster.communication_costs])
        # Ranks of a node that convert the same. What they have summed is converted by one of them.
        copies = np.ones(len(self.group)) if self.sums_inside else np.array(self.nodes)[self.node_of_rank] / self.group
        return 0.5 * gradient_bytes * costs[self.node_of_rank] * np.maximum(1, copies) * float(self.converts)

    # The two kinds of steps

    def _bucket_shares(self) -> list[float]:
        """Shares of the gradient in each bucket, in the order of travel: as measured, else as the engine cuts it."""
        if self.model.ready_bytes and not self.traits.is_plain:
            sizes = reduction_bytes(self.model.ready_bytes, self.communication_dtype)
            return [size / sum(sizes) for size in sizes]
        if self.traits.shared_by is SharedBy.NODE:
            units = [*reversed(self.model.unit_bytes), self.model.root_bytes]
            return [unit / self.model.parameter_bytes for unit in units if unit > 0]
        total = self.model.gradient_bytes
        first = min(total, _TORCH_FIRST_BUCKET) if self.traits.is_plain else 0.0
        # Rounded up. Equal buckets stand for the engine's, of which the last one is smaller.
        count = int(-(-(total - first) // (_TORCH_BUCKET if self.traits.is_plain else BUCKET_BYTES)))
        buckets = [first, *[(total - first) / max(1, count)] * count]
        return [bucket / total for bucket in buckets if bucket > 0]

    def write_overlapped(self) -> None:
        """Writes a step whose gradients travel between nodes while the backward goes on."""
        parameters, gradients = self.model.parameter_bytes, self.model.gradient_bytes
        before = self._ready_seconds(0.0)
        earlier = self.steps - 1  # micro-batches before the last one: gathered twice, reduced inside the nodes only
        count = self.unit_count
        extra = self._exposed_seconds(self._intra_node_seconds(parameters, units=count), before)
        every = self._intra_node_seconds(2 * parameters + gradients, earlier, units=3 * count)
        extra = extra + earlier * self._exposed_seconds(every, self.time)
        self._add_segment(self.optimizer + self.overhead + earlier * self.time + before, extra=extra)
        # `before`: seconds of the last micro-batch that are in segments already; `done`: share of the gradient.
        done, last = 0.0, None
        for piece in self._bucket_shares():
            done = min(1.0, done + piece)  # the shares may sum to a little more than 1 by rounding
            ready = np.maximum(before, self._ready_seconds(done))
            gathered, reduced = (self._intra_node_seconds(piece * size) for size in (parameters, gradients))
            exchanged = np.maximum(gathered, reduced) if self.is_streamed else gathered + reduced
            exchanged = exchanged + self._sum_inside_seconds(piece * gradients)
            extra = self._conversion_seconds(piece * gradients) + self._exposed_seconds(exchanged, ready - before)
            place = self._add_segment(ready - before, needs=last if self.blocks else None, extra=extra)
            # On one node the exchange inside it has summed everything, but that of plain copies, which is a ring.
            if len(self.nodes) > 1 or not (self.shares_inside or self.sums_inside):
                last = self._add_transfer(self.collectives.all_reduce, piece * gradients * self.wire_share, place)
            before = ready
        self._add_segment(np.maximum(0.0, self.time + self.load - before), needs=last if self.blocks else None)
        if self.converts:
            # Everything is decompressed after the last transfer, which the optimizer step has to wait for.
            self._add_segment(np.zeros(len(self.time)), needs=last, extra=self._conversion_seconds(gradients))

    def write_world_sharded(self) -> None:
        """Writes a step that gathers each unit before it is computed and reduces its gradient after its backward."""
        units, root = self.model.unit_bytes, self.model.root_bytes
        to_gradient = self.model.gradient_bytes / self.model.parameter_bytes
        forward, backward = self.time * (1 - BACKWARD_SHARE), self.time * BACKWARD_SHARE
        count = int(self.steps.max())  # equal on all ranks: the world is one shard group
        gathered = 1 if self.traits.gathered is Gathered.EACH_STEP else count
        again = self.traits.gathered is Gathered.EACH_PASS
        extra = self._packing_seconds(root * (gathered + to_gradient), (gathered + 1) * (self.unit_count - len(units)))
        place = self._add_segment(self.optimizer + self.overhead, extra=extra)
        for micro_batch in range(count):
            gathers = micro_batch < gathered
            if gathers and root:
                self._add_transfer(self.collectives.gather, root, place)
            place = self._write_pass(units, forward, place, gathers=gathers)
            gradients = to_gradient if micro_batch == count - 1 else None
            place = self._write_pass(units[::-1], backward, place, gathers=again, gradients=gradients)
        if root:
            # The root holds the parameters that the forward uses first, so its gradients are ready last.
            self._add_transfer(self.collectives.reduce_scatter, root * to_gradient * self.wire_share, place)

    def _write_pass(
        self, units: Sequence[float], seconds: np.ndarray, place: int, *, gathers: bool, gradients: float | None = None
    ) -> int:
        """A forward or a backward through the units, after segment `place`; returns its last segment.

        Args:
            units: bytes, in the order of this pass.
            seconds: of each rank, of the whole pass.
            gathers: every unit is gathered before it is computed; with streams while the unit before is computed.
            gradients: bytes of gradients for each byte of a unit; they are reduced after it. None: they are not.
        """
        gathered: dict[int, int | None] = {}
        last = None
        for number, unit in enumerate(units):
            for ahead in (number, number + 1) if self.cluster.streams else (number,):
                if gathers and ahead < len(units) and ahead not in gathered:
                    gathered[ahead] = self._add_transfer(self.collectives.gather, units[ahead], place)
            extra = self._packing_seconds(unit * gathers, int(gathers))
            if gradients is not None:
                # A unit's gradient is compressed and decompressed here, hence twice.
                conversion = 2 * self._conversion_seconds(unit * gradients)
                extra = extra + self._packing_seconds(unit * gradients) + conversion
            # A unit that is not gathered waits for the reduction of the one before it, where exchanges block.
            place = self._add_segment(seconds * (unit / sum(units)), needs=gathered.get(number, last), extra=extra)
            if gradients is not None:
                payload = unit * gradients * self.wire_share
                reduced = self._add_transfer(self.collectives.reduce_scatter, payload, place)
                last = reduced if self.blocks else None
        return place

    # What comes out

    def simulate(self) -> StepPrediction:
        """The seconds and bytes of the step that was written."""
        segments = [Segment(tuple(row.tolist()), need) for row, need in zip(self.segments, self.needs, strict=True)]
        simulated = self.cluster.simulate(segments, self.transfers, self.node_of_rank.tolist())
        compute = self.steps * self.time + self.overhead
        # What computing took longer than written is what transfers took of the processors.
        slowed = np.maximum(0.0, np.array(simulated.busy_seconds) - np.sum(self.segments, axis=0))
        communication = self.extra + self.load + slowed
        wait = np.maximum(0.0, simulated.seconds - compute - self.optimizer - communication)
        columns = zip(compute, self.optimizer, communication, wait, strict=True)
        sent = np.sum([exchange.sent_bytes for exchange in self.exchanges] or [[0.0] * len(self.nodes)], axis=0)
        return StepPrediction(
            float(simulated.seconds),
            tuple(RankStep(*map(float, values)) for values in columns),
            tuple(sent.tolist()),
            tuple(self.inside_bytes.tolist()),
        )
