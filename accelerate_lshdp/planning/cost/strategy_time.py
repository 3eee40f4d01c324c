# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The predicted step time of any strategy on a described cluster.

From measured (or estimated) curves of computing, a link between nodes, and what communication takes of each node's
processors, a step is written down as segments and transfers (`step_simulation`) and played through:

* replicated and node-sharded strategies: gradients travel bucket by bucket while the backward goes on;
* world-sharded ones: each unit is gathered before it is computed and reduced after its backward. On devices without
  streams everybody waits for each of these; with streams the next unit is gathered during the one before.

A step begins with the optimizer step of the one before: that is when all ranks are level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from accelerate_lshdp.documents.curves import RankProfile
from accelerate_lshdp.documents.network import Collective, Exchange
from accelerate_lshdp.documents.strategy import SharedBy, collectives_of, group_sizes, strategy_traits
from accelerate_lshdp.planning.cost.cluster_model import ClusterModel, ModelSize
from accelerate_lshdp.planning.cost.step_simulation import Segment, Transfer, play_step


#: What a gradient of one byte in fp32 has on the wire. int8: one scale of 4 bytes for each block of 1024.
WIRE_SHARES = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 1024)}
#: The backward takes about two thirds of a micro-batch: it multiplies matrices twice as often as the forward.
BACKWARD_SHARE = 2 / 3
#: Of the engine's own buckets, and of torch's (the first one is small).
BUCKET_BYTES = 25e6
_TORCH_FIRST_BUCKET, _TORCH_BUCKET = 2**20, 25 * 2**20
#: What copying through shared memory takes of what sending through a socket does. Assumed, not measured.
_SHARED_MEMORY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank does in a step, in seconds.

    Args:
        compute_seconds: forward and backward.
        optimizer_seconds: its optimizer step.
        communication_seconds: what exchanges inside the node, conversions, and transfers that take its processor add.
        wait_seconds: the rest.
    """

    compute_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """What is predicted for a step.

    Args:
        seconds: of the whole step.
        ranks: what each of them does.
        bytes_between_nodes: what each node sends to other nodes.
        bytes_inside_nodes: what each node's ranks send to each other, shared memory aside.
    """

    seconds: float
    ranks: tuple[RankStep, ...]
    bytes_between_nodes: tuple[float, ...]
    bytes_inside_nodes: tuple[float, ...]


def predict_step(
    strategy: str,
    profiles: Sequence[RankProfile],
    micro_batches: Sequence[tuple[int, int]],
    model: ModelSize,
    cluster: ClusterModel,
    *,
    communication_dtype: str = "fp32",
    wire_bytes: float | None = None,
    optimizer_shares: Sequence[float] | None = None,
    load_seconds: Sequence[float] | None = None,
) -> StepPrediction:
    """Predicts one optimizer step.

    Args:
        strategy: one of `STRATEGIES`.
        profiles: of each rank, measured without communication: `fixed_seconds` is its optimizer step and nothing else.
        micro_batches: (size, accumulation steps) of each rank.
        model: its size.
        cluster: nodes and network.
        communication_dtype: of gradients on the wire.
        wire_bytes: of all gradients on the wire, for formats whose size depends on the model (powersgd).
        optimizer_shares: the part of its profiled optimizer step that a rank does. None: 1/n where n ranks share one
            copy of the parameters, as if the profiled step was of all parameters.
        load_seconds: what sending gradients was measured to add to each rank's backward; strategies that send during
            the backward take that instead of what `cluster.handling` says. None: not measured.

    Raises:
        ValueError: the arguments do not match, or a batch is larger than measured.
    """
    world = sum(cluster.nodes)
    if len(profiles) != world or len(micro_batches) != world:
        raise ValueError(
            f"found {len(profiles)} profiles and {len(micro_batches)} batches for nodes with {list(cluster.nodes)}"
            " ranks, expected one of each for every rank"
        )
    if wire_bytes is None:
        if communication_dtype not in WIRE_SHARES:
            raise ValueError(f"found {communication_dtype!r} without wire_bytes, expected the bytes of all gradients")
        wire_bytes = model.gradient_bytes * WIRE_SHARES[communication_dtype]
    writer = _StepWriter(strategy, model, cluster, communication_dtype, wire_bytes)
    writer.describe_ranks(profiles, micro_batches, optimizer_shares, load_seconds)
    if writer.traits.shared_by is SharedBy.WORLD:
        writer.write_world_sharded()
    else:
        writer.write_overlapped()
    return writer.play()


def reduction_bytes(bucket_bytes: Sequence[float], communication_dtype: str) -> list[float]:
    """Bytes of gradients in each reduction of a step, in fp32.

    PowerSGD sends so little that the engine gives it few large buckets, of up to `BUCKET_BYTES`; not so where FSDP2
    shards nodes of several ranks, which this leaves out.

    Args:
        bucket_bytes: of the buckets in other formats, in the order in which they travel; of gradients in fp32.
        communication_dtype: the format.
    """
    if communication_dtype != "powersgd":
        return list(bucket_bytes)
    merged = [0.0]
    for size in bucket_bytes:
        if merged[-1] and merged[-1] + size > BUCKET_BYTES:
            merged.append(0.0)
        merged[-1] += size
    return merged


class _StepWriter:
    """Writes a step down as segments and transfers. Arrays have one entry a rank."""

    def __init__(
        self, strategy: str, model: ModelSize, cluster: ClusterModel, communication_dtype: str, wire_bytes: float
    ) -> None:
        self.traits, self.model, self.cluster = strategy_traits(strategy), model, cluster
        self.nodes = cluster.nodes
        self.collectives = collectives_of(self.traits, self.nodes, communication_dtype, cluster.two_stage)
        self.communication_dtype = communication_dtype
        self.wire_share = wire_bytes / model.gradient_bytes if model.gradient_bytes else 0.0
        self.converts = communication_dtype != "fp32" and len(self.nodes) > 1
        self.node_of_rank = np.repeat(np.arange(len(self.nodes)), self.nodes)
        self.group = np.array(group_sizes(self.traits, self.nodes))[self.node_of_rank]
        self.shares_inside = self.traits.shared_by is SharedBy.NODE and self.group.max() > 1
        self.in_memory = self.shares_inside and cluster.shared_memory
        self.blocks = not (self.traits.overlaps or cluster.streams)
        # FSDP2 works on units whatever the size of its groups; the engine uses it where ranks share a copy.
        plain_units = self.traits.is_plain and self.traits.shared_by is SharedBy.NODE
        self.has_units = (
            self.traits.shared_by is SharedBy.WORLD or plain_units or (self.shares_inside and not self.in_memory)
        )
        self.unit_count = len(model.unit_bytes) + (1 if model.root_bytes else 0)
        self.segments: list[np.ndarray] = []
        self.needs: list[int | None] = []
        self.exchanges: list[Exchange] = []
        self.transfers: list[Transfer] = []
        self.extra = np.zeros(len(self.group))  # seconds that are neither computing nor the optimizer
        self.inside_bytes = np.zeros(len(self.nodes))

    # Ranks

    def describe_ranks(
        self,
        profiles: Sequence[RankProfile],
        micro_batches: Sequence[tuple[int, int]],
        optimizer_shares: Sequence[float] | None,
        load_seconds: Sequence[float] | None,
    ) -> None:
        shares = 1 / self.group if optimizer_shares is None else np.array(optimizer_shares, dtype=float)
        self.optimizer = np.array([profile.fixed_seconds for profile in profiles]) * shares
        self.time = np.array([p.time(m) for p, (m, _) in zip(profiles, micro_batches, strict=True)])
        self.load_is_known = load_seconds is not None and self.traits.overlaps and len(self.nodes) > 1
        self.load = np.array(load_seconds, dtype=float) if self.load_is_known else np.zeros(len(self.time))
        self.steps = np.array([steps for _, steps in micro_batches])
        self.overhead = (self.steps - 1) * np.array([p.accumulation_overhead_seconds for p in profiles])
        self.readiness = [
            self._readiness(profile, size, time, load)
            for profile, (size, _), time, load in zip(
                profiles, micro_batches, self.time.tolist(), self.load.tolist(), strict=True
            )
        ]

    def _readiness(self, profile: RankProfile, size: int, time: float, load: float) -> tuple[list[float], list[float]]:
        """Shares of the gradient, and when so much of it is ready; `load` makes the backward so much longer."""
        forward, ready_bytes = time * (1 - BACKWARD_SHARE), self.model.ready_bytes
        if not ready_bytes or not profile.bucket_ready:
            return [0.0, 1.0], [forward, time + load]
        if len(ready_bytes) != len(profile.bucket_ready):
            raise ValueError(
                f"found {len(ready_bytes)} ready_bytes for {len(profile.bucket_ready)} curves of readiness, expected"
                " one for each"
            )
        sums = list(accumulate(ready_bytes))
        times = [min(curve(size), time) for curve in profile.bucket_ready]
        begin = min(forward, times[0])
        stretch = (time + load - begin) / (time - begin) if time > begin else 1.0
        return [0.0, *(value / sums[-1] for value in sums)], [begin, *(begin + (t - begin) * stretch for t in times)]

    def _ready_at(self, share: float) -> np.ndarray:
        return np.array([np.interp(share, shares, times) for shares, times in self.readiness])

    # Parts of a step

    def _compute(self, seconds: np.ndarray, needs: int | None = None, extra: np.ndarray | float = 0.0) -> int:
        """Adds a segment; returns its place."""
        self.extra += extra
        whole = seconds + extra
        if self.shares_inside and not self.in_memory:
            # Ranks of a node gather and reduce together: as fast as the slowest of them.
            slowest = [whole[self.node_of_rank == node].max() for node in range(len(self.nodes))]
            whole = np.array(slowest)[self.node_of_rank]
        self.segments.append(whole)
        self.needs.append(needs)
        return len(self.segments) - 1

    def _transfer(self, collective: Collective, payload: float, after: int) -> int | None:
        """Adds an exchange; returns its place, or None where there is nothing to exchange."""
        if len(self.group) == 1:
            return None
        exchange = collective(payload, self.nodes)
        self.inside_bytes += np.array(exchange.handled_bytes) - np.array(exchange.sent_bytes)
        self.exchanges.append(exchange)
        inside = np.array(exchange.inside_bytes or (0.0,) * len(self.nodes))
        loads = self._loads(np.array(exchange.handled_bytes) - inside)
        # Beside computing each message may wait for a processor.
        beside = 0.0 if self.blocks else exchange.rounds * self.cluster.message_delay_seconds
        between, within = exchange.seconds(self.cluster.link), self._seconds_within(exchange)
        # In one stage both links are used at the same time.
        wire = between if inside.any() else max(between, within)
        seconds = self._copy_seconds(payload) + wire
        self.transfers.append(Transfer(seconds, loads, after, beside))
        if inside.any():
            self.transfers.append(Transfer(within, self._loads(inside, inside=True), after))
        return len(self.transfers) - 1

    def _seconds_within(self, exchange: Exchange) -> float:
        """On the links inside the nodes, where those are not the processors' work."""
        if self.cluster.inside is None:
            return 0.0
        sizes = zip(exchange.handled_bytes, exchange.sent_bytes, self.nodes, strict=True)
        busy = [((handled - sent) / ranks, ranks - 1) for handled, sent, ranks in sizes if handled > sent]
        return max((self.cluster.inside.seconds(size, rounds) for size, rounds in busy), default=0.0)

    def _copy_seconds(self, payload: float) -> float:
        """Of each rank's part of a unit between the host, where an offloaded copy is, and its device."""
        link = self.cluster.device_link
        if link is None or not (self.traits.is_offloaded and self.traits.shared_by is SharedBy.WORLD):
            return 0.0
        return link.seconds(payload / len(self.group))

    def _loads(self, handled_bytes: np.ndarray, inside: bool = False) -> tuple[float, ...]:
        """What a collective takes of the processors of each node, beyond what is known to make backwards longer."""
        if self.load_is_known:
            return (0.0,) * len(self.nodes)
        # A bucket that lies in a node's shared memory is sent by one rank of the node.
        ranks = [1] * len(self.nodes) if self.in_memory else self.nodes
        return tuple(
            float(
                handled * (own.seconds_per_byte_inside if inside else own.seconds_per_byte)
                + count * own.seconds_per_collective
            )
            for handled, own, count in zip(handled_bytes, self.cluster.handling, ranks, strict=True)
        )

    def _packing(self, payload: float, units: float = 1) -> np.ndarray:
        """Seconds in which every rank prepares the exchange of so many units, and copies `payload` bytes of them."""
        costs = [payload * own.copy_seconds_per_byte + units * own.seconds_per_unit for own in self.cluster.handling]
        return (np.array(costs) * np.array(self.nodes))[self.node_of_rank] * float(self.has_units)

    def _inside(self, payload: float, times: np.ndarray | int = 1, units: float = 1) -> np.ndarray:
        """Seconds of one all-gather or reduce-scatter of `payload` bytes inside each node; its bytes count `times`.

        Where the node's copy is in host memory, each rank's part goes to or from its device, too.
        """
        seconds = self._packing(payload, units)
        if self.traits.is_offloaded and self.cluster.device_link is not None:
            seconds += np.array([self.cluster.device_link.seconds(payload / share) for share in self.group])
        if not self.shares_inside:
            return seconds
        rounds = np.broadcast_to(times, len(self.group))
        for node, count in enumerate(self.nodes):
            ranks = self.node_of_rank == node
            handled, own, link = (count - 1) * payload, self.cluster.handling[node], self.cluster.inside
            if self.in_memory:
                seconds[ranks] += _SHARED_MEMORY_SHARE * handled * own.seconds_per_byte
                continue
            self.inside_bytes[node] += rounds[ranks].max() * handled
            wire = link.seconds((count - 1) / count * payload, count - 1) if link is not None else 0.0
            seconds[ranks] += max(handled * own.seconds_per_byte_inside + count * own.seconds_per_collective, wire)
        return seconds

    def _beside(self, exchange: np.ndarray, compute: np.ndarray) -> np.ndarray:
        """What an exchange inside a node adds to computing: with streams, what does not fit beside it."""
        return np.maximum(0.0, exchange - compute) if self.cluster.streams else exchange

    def _conversion(self, gradient_bytes: float) -> np.ndarray:
        """Half of what it takes to compress and decompress so much of the gradient: either way once."""
        costs = np.array([handling.conversion_seconds_per_byte for handling in self.cluster.handling])
        copies = np.array(self.nodes)[self.node_of_rank] / self.group  # ranks of a node that convert the same
        return 0.5 * gradient_bytes * costs[self.node_of_rank] * np.maximum(1, copies) * float(self.converts)

    # The two kinds of steps

    def _pieces(self) -> list[float]:
        """Shares of the gradient in the order in which they travel: as measured, else as the engine would cut it."""
        if self.model.ready_bytes and not self.traits.is_plain:
            sizes = reduction_bytes(self.model.ready_bytes, self.communication_dtype)
            return [size / sum(sizes) for size in sizes]
        if self.traits.shared_by is SharedBy.NODE:
            units = [*reversed(self.model.unit_bytes), self.model.root_bytes]
            return [unit / self.model.parameter_bytes for unit in units if unit > 0]
        total = self.model.gradient_bytes
        first = min(total, _TORCH_FIRST_BUCKET) if self.traits.is_plain else 0.0
        count = int(-(-(total - first) // (_TORCH_BUCKET if self.traits.is_plain else BUCKET_BYTES)))
        buckets = [first, *[(total - first) / max(1, count)] * count]
        return [bucket / total for bucket in buckets if bucket > 0]

    def write_overlapped(self) -> None:
        """Gradients travel between nodes while the backward goes on."""
        parameters, gradients = self.model.parameter_bytes, self.model.gradient_bytes
        before = self._ready_at(0.0)
        earlier = self.steps - 1  # micro-batches before the last one: gathered twice, reduced inside the nodes only
        count = self.unit_count
        extra = self._beside(self._inside(parameters, units=count), before)
        every = self._inside(2 * parameters + gradients, earlier, units=3 * count)
        extra = extra + earlier * self._beside(every, self.time)
        self._compute(self.optimizer + self.overhead + earlier * self.time + before, extra=extra)
        done, last = 0.0, None
        for piece in self._pieces():
            done = min(1.0, done + piece)
            ready = np.maximum(before, self._ready_at(done))
            exchanged = self._inside(piece * parameters) + self._inside(piece * gradients)
            extra = self._conversion(piece * gradients) + self._beside(exchanged, ready - before)
            place = self._compute(ready - before, needs=last if self.blocks else None, extra=extra)
            if len(self.nodes) > 1 or not self.shares_inside:
                last = self._transfer(self.collectives.all_reduce, piece * gradients * self.wire_share, place)
            before = ready
        self._compute(np.maximum(0.0, self.time + self.load - before), needs=last if self.blocks else None)
        if self.converts:
            self._compute(np.zeros(len(self.time)), needs=last, extra=self._conversion(gradients))

    def write_world_sharded(self) -> None:
        """Units are gathered before they are computed, and their gradients reduced after their backward."""
        units, root = self.model.unit_bytes, self.model.root_bytes
        to_gradient = self.model.gradient_bytes / self.model.parameter_bytes
        forward, backward = self.time * (1 - BACKWARD_SHARE), self.time * BACKWARD_SHARE
        count = int(self.steps.max())
        gathered = count if self.traits.gathers_twice else 1
        extra = self._packing(root * (gathered + to_gradient), (gathered + 1) * (self.unit_count - len(units)))
        place = self._compute(self.optimizer + self.overhead, extra=extra)
        for micro_batch in range(count):
            gathers = self.traits.gathers_twice or micro_batch == 0
            if gathers and root:
                self._transfer(self.collectives.gather, root, place)
            place = self._pass(units, forward, place, gathers=gathers)
            gradients = to_gradient if micro_batch == count - 1 else None
            place = self._pass(units[::-1], backward, place, gathers=self.traits.gathers_twice, gradients=gradients)
        if root:
            self._transfer(self.collectives.reduce_scatter, root * to_gradient * self.wire_share, place)

    def _pass(
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
                    gathered[ahead] = self._transfer(self.collectives.gather, units[ahead], place)
            extra = self._packing(unit * gathers, int(gathers))
            if gradients is not None:
                extra = extra + self._packing(unit * gradients) + 2 * self._conversion(unit * gradients)
            place = self._compute(seconds * (unit / sum(units)), needs=gathered.get(number, last), extra=extra)
            if gradients is not None:
                reduced = self._transfer(self.collectives.reduce_scatter, unit * gradients * self.wire_share, place)
                last = reduced if self.blocks else None
        return place

    # What comes out

    def play(self) -> StepPrediction:
        segments = [Segment(tuple(row.tolist()), need) for row, need in zip(self.segments, self.needs, strict=True)]
        played = play_step(segments, self.transfers, self.node_of_rank.tolist(), self.cluster.processors)
        compute = self.steps * self.time + self.overhead
        slowed = np.maximum(0.0, np.array(played.busy_seconds) - np.sum(self.segments, axis=0))
        communication = self.extra + self.load + slowed
        wait = np.maximum(0.0, played.seconds - compute - self.optimizer - communication)
        columns = zip(compute, self.optimizer, communication, wait, strict=True)
        sent = np.sum([exchange.sent_bytes for exchange in self.exchanges] or [[0.0] * len(self.nodes)], axis=0)
        return StepPrediction(
            float(played.seconds),
            tuple(RankStep(*map(float, values)) for values in columns),
            tuple(sent.tolist()),
            tuple(self.inside_bytes.tolist()),
        )
