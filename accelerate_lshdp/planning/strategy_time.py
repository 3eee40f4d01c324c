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

from accelerate_lshdp.planning.curves import RankProfile
from accelerate_lshdp.planning.network import Collective, Exchange, Link
from accelerate_lshdp.planning.step_simulation import Segment, Transfer, play_step
from accelerate_lshdp.planning.strategies import (
    Collectives,
    SharedBy,
    StrategyTraits,
    collectives_of,
    group_sizes,
    strategy_traits,
)


#: What a gradient of one byte in fp32 has on the wire. int8: one scale of 4 bytes for each block of 256.
WIRE_SHARES = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 256)}
#: The backward takes about two thirds of a micro-batch: it multiplies matrices twice as often as the forward.
BACKWARD_SHARE = 2 / 3
#: Of the engine's own buckets, and of torch's (the first one is small).
BUCKET_BYTES = 25e6
_TORCH_FIRST_BUCKET, _TORCH_BUCKET = 2**20, 25 * 2**20
_UNITS = 8
#: Copying through shared memory takes about a tenth of what sending through a socket does.
_SHARED_MEMORY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large the model is on its way.

    Args:
        parameter_bytes: of all parameters, as they are gathered.
        gradient_bytes: of all gradients before they are compressed.
        unit_bytes: parameters of each unit, in the order of the forward; the rest belongs to the root. Empty: equal
            units without a root.
    """

    parameter_bytes: float
    gradient_bytes: float
    unit_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        units = tuple(self.unit_bytes) or (self.parameter_bytes / _UNITS,) * _UNITS
        if sum(units) > self.parameter_bytes * (1 + 1e-9):
            raise ValueError(
                f"found units of {sum(units):.0f} bytes in a model of {self.parameter_bytes:.0f}: correct either"
            )
        object.__setattr__(self, "unit_bytes", units)

    @property
    def root_bytes(self) -> float:
        """Parameters in no unit."""
        return max(0.0, self.parameter_bytes - sum(self.unit_bytes))


@dataclass(frozen=True, slots=True)
class Handling:
    """What communication takes of a node's processors, in seconds of the node when it does nothing else.

    Args:
        seconds_per_byte: for a byte that its ranks send: sending it, receiving another one, adding or copying it.
        seconds_per_collective: for every collective, whatever its size.
        conversion_seconds_per_byte: for a byte of a gradient that is compressed and decompressed.
    """

    seconds_per_byte: float = 0.0
    seconds_per_collective: float = 0.0
    conversion_seconds_per_byte: float = 0.0

    def on(self, cores: float) -> Handling:
        """These CPU seconds on a node that has so many cores, a fraction included."""
        return Handling(
            self.seconds_per_byte / cores,
            self.seconds_per_collective / cores,
            self.conversion_seconds_per_byte / cores,
        )


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
        bytes_inside_nodes: what each node's ranks send to each other.
    """

    seconds: float
    ranks: tuple[RankStep, ...]
    bytes_between_nodes: tuple[float, ...]
    bytes_inside_nodes: tuple[float, ...]


def predict_step(
    strategy: str,
    profiles: Sequence[RankProfile],
    micro_batches: Sequence[tuple[int, int]],
    *,
    size: ModelSize,
    nodes: Sequence[int],
    link: Link,
    handling: Sequence[Handling] | None = None,
    communication_dtype: str = "fp32",
    wire_bytes: float | None = None,
    ready_bytes: Sequence[float] | None = None,
    optimizer_shares: Sequence[float] | None = None,
    inside: Link | None = None,
    shared_memory: bool = False,
    two_stage: bool = True,
    streams: bool = False,
) -> StepPrediction:
    """Predicts one optimizer step.

    Args:
        strategy: one of `STRATEGIES`.
        profiles: of each rank, measured without communication: `fixed_seconds` is its optimizer step and nothing else.
        micro_batches: (size, accumulation steps) of each rank.
        size: of the model.
        nodes: ranks on each node, in rank order.
        link: between nodes.
        handling: what communication takes of each node's processors. None: nothing, as where a device computes.
        communication_dtype: of gradients on the wire.
        wire_bytes: of all gradients on the wire, for formats whose size depends on the model (powersgd).
        ready_bytes: of the gradient buckets that `bucket_ready` in the profiles is about. None, or no such curves:
            gradients appear evenly during the backward.
        optimizer_shares: the part of the profiled optimizer step that a rank does under this strategy. None: it holds
            1/n of the parameters, and the profiled one was of all of them.
        inside: the link between ranks of a node, where processors do not do the work (`handling` counts those).
        shared_memory: ranks of a node exchange through shared memory.
        two_stage: world-sharded strategies exchange in two stages.
        streams: devices gather and reduce while they compute.

    Raises:
        ValueError: the arguments do not match, or a batch is larger than measured.
    """
    traits = strategy_traits(strategy)
    world = sum(nodes)
    if not nodes or min(nodes) < 1 or len(profiles) != world or len(micro_batches) != world:
        raise ValueError(
            f"found {len(profiles)} profiles and {len(micro_batches)} batches for nodes with {list(nodes)} ranks,"
            " expected one of each for every rank"
        )
    if handling is not None and len(handling) != len(nodes):
        raise ValueError(f"found handling of {len(handling)} nodes, expected one for each of {len(nodes)} nodes")
    if wire_bytes is None:
        if communication_dtype not in WIRE_SHARES:
            raise ValueError(
                f"found {communication_dtype!r} without wire_bytes: how much travels depends on the model"
            )
        wire_bytes = size.gradient_bytes * WIRE_SHARES[communication_dtype]
    writer = _StepWriter(
        traits, profiles, micro_batches, size, list(nodes), link, list(handling or [Handling()] * len(nodes)),
        collectives_of(traits, nodes, communication_dtype, two_stage), wire_bytes, ready_bytes,
        optimizer_shares, inside, shared_memory, streams,
        converts=communication_dtype != "fp32",
    )  # fmt: skip
    return writer.predict()


class _StepWriter:
    """Writes a step down as segments and transfers."""

    def __init__(
        self,
        traits: StrategyTraits,
        profiles: Sequence[RankProfile],
        micro_batches: Sequence[tuple[int, int]],
        size: ModelSize,
        nodes: list[int],
        link: Link,
        handling: list[Handling],
        collectives: Collectives,
        wire_bytes: float,
        ready_bytes: Sequence[float] | None,
        optimizer_shares: Sequence[float] | None,
        inside: Link | None,
        shared_memory: bool,
        streams: bool,
        converts: bool,
    ) -> None:
        self.traits, self.size, self.nodes, self.link, self.handling = traits, size, nodes, link, handling
        self.collectives, self.inside, self.streams = collectives, inside, streams
        self.shared_memory = shared_memory
        self.wire_share = wire_bytes / size.gradient_bytes if size.gradient_bytes else 0.0
        self.converts = converts and len(nodes) > 1
        self.node_of_rank = np.repeat(np.arange(len(nodes)), nodes)
        self.group = np.array(group_sizes(traits, nodes))[self.node_of_rank]
        shares = 1 / self.group if optimizer_shares is None else np.array(optimizer_shares, dtype=float)
        self.optimizer = np.array([profile.fixed_seconds for profile in profiles]) * shares
        self.time = np.array([p.time(m) for p, (m, _) in zip(profiles, micro_batches, strict=True)])
        self.steps = np.array([steps for _, steps in micro_batches])
        overhead = np.array([profile.accumulation_overhead_seconds for profile in profiles])
        self.overhead = (self.steps - 1) * overhead
        self.ready = self._readiness(profiles, micro_batches, ready_bytes)
        self.segments: list[np.ndarray] = []
        self.needs: list[int | None] = []
        self.transfers: list[tuple[Exchange, int]] = []
        self.extra = np.zeros(len(self.time))  # seconds of a rank that are neither its computing nor its optimizer
        self.inside_bytes = np.zeros(len(nodes))

    # What goes into a step

    def _readiness(
        self,
        profiles: Sequence[RankProfile],
        micro_batches: Sequence[tuple[int, int]],
        ready_bytes: Sequence[float] | None,
    ) -> list[tuple[list[float], list[float]]]:
        """Of each rank: shares of the gradient, and when so much of it is ready."""
        curves = []
        for profile, (size, _), time in zip(profiles, micro_batches, self.time, strict=True):
            backward = time * (1 - BACKWARD_SHARE)
            if ready_bytes and profile.bucket_ready:
                if len(ready_bytes) != len(profile.bucket_ready):
                    raise ValueError(
                        f"found {len(ready_bytes)} ready_bytes for {len(profile.bucket_ready)} curves of readiness,"
                        " expected one for each"
                    )
                sums = list(accumulate(ready_bytes))
                times = [min(float(curve(size)), float(time)) for curve in profile.bucket_ready]
                begins = min(backward, times[0])
                curves.append(([0.0, *(value / sums[-1] for value in sums)], [begins, *times]))
            else:
                curves.append(([0.0, 1.0], [backward, float(time)]))
        return curves

    def _ready_at(self, share: float) -> np.ndarray:
        return np.array([np.interp(share, shares, times) for shares, times in self.ready])

    def _compute(self, seconds: np.ndarray, needs: int | None = None, extra: np.ndarray | float = 0.0) -> int:
        """Adds a segment; returns its place."""
        whole = seconds + extra
        if self.traits.shared_by is SharedBy.NODE and self.group.max() > 1:
            # Ranks of a node gather and reduce together: as fast as the slowest of them.
            slowest = [whole[self.node_of_rank == node].max() for node in range(len(self.nodes))]
            whole = np.array(slowest)[self.node_of_rank]
        self.extra += extra
        self.segments.append(whole)
        self.needs.append(needs)
        return len(self.segments) - 1

    def _transfer(self, collective: Collective, payload: float, after: int) -> int:
        exchange = collective(payload, self.nodes)
        self.inside_bytes += np.array(exchange.handled_bytes) - np.array(exchange.sent_bytes)
        self.transfers.append((exchange, after))
        return len(self.transfers) - 1

    def _inside(self, payload: float, times: np.ndarray | int = 1) -> np.ndarray:
        """Seconds of each rank for one all-gather or reduce-scatter of `payload` bytes inside its node.

        Its bytes count so many times (of each rank).
        """
        if self.traits.shared_by is not SharedBy.NODE or self.group.max() == 1:
            return np.zeros(len(self.group))
        seconds = []
        for node, count in enumerate(self.nodes):
            handled = (count - 1) * payload
            rounds = np.broadcast_to(times, len(self.group))[self.node_of_rank == node].max()
            self.inside_bytes[node] += 0 if self.shared_memory else rounds * handled
            own = self.handling[node]
            work = handled * own.seconds_per_byte * (_SHARED_MEMORY_SHARE if self.shared_memory else 1)
            wire = self.inside.seconds((count - 1) / count * payload, count - 1) if self.inside is not None else 0.0
            seconds.append(max(work + own.seconds_per_collective, wire))
        return np.array(seconds)[self.node_of_rank]

    def _beside(self, exchange_seconds: np.ndarray, compute_seconds: np.ndarray) -> np.ndarray:
        """What an exchange inside a node adds to computing: with streams, what does not fit beside it."""
        return np.maximum(0.0, exchange_seconds - compute_seconds) if self.streams else exchange_seconds

    def _conversion(self, gradient_bytes: float) -> np.ndarray:
        """Half of what converting so much of the gradient takes of each rank's node."""
        if not self.converts:
            return np.zeros(len(self.group))
        shares = [handling.conversion_seconds_per_byte for handling in self.handling]
        ranks = np.array(self.nodes if self.group.max() == 1 else [1] * len(self.nodes))
        return (0.5 * gradient_bytes * np.array(shares) * ranks)[self.node_of_rank]

    # The two kinds of steps

    def predict(self) -> StepPrediction:
        if self.traits.shared_by is SharedBy.WORLD:
            self._write_world_sharded()
        else:
            self._write_overlapped()
        return self._play()

    def _pieces(self) -> list[float]:
        """Shares of the gradient in the order in which they travel."""
        if self.traits.shared_by is SharedBy.NODE:
            units = [*reversed(self.size.unit_bytes), self.size.root_bytes]
            return [unit / self.size.parameter_bytes for unit in units if unit > 0]
        total = self.size.gradient_bytes
        if not self.traits.is_plain:
            count = max(1, -(-total // BUCKET_BYTES))
            return [1 / count] * int(count)
        first = min(total, _TORCH_FIRST_BUCKET)
        count = int(-(-(total - first) // _TORCH_BUCKET))
        return [first / total, *([(total - first) / count / total] * count)]

    def _write_overlapped(self) -> None:
        blocks = not (self.traits.overlaps or self.streams)
        is_sharded = self.traits.shared_by is SharedBy.NODE
        parameters, gradients = self.size.parameter_bytes, self.size.gradient_bytes
        forward = self._ready_at(0.0)
        # Earlier micro-batches and the forward of the last one, with what is gathered and reduced inside the nodes.
        earlier = (self.steps - 1) * self.time
        extra = np.zeros(len(self.time))
        if is_sharded:
            extra = self._beside(self._inside(parameters), forward)
            per_round = self._inside(2 * parameters + gradients, self.steps - 1)
            extra = extra + (self.steps - 1) * self._beside(per_round, self.time)
        self._compute(self.optimizer + self.overhead + earlier + forward, extra=extra)
        done, before, last = 0.0, forward, None
        for piece in self._pieces():
            done = min(1.0, done + piece)
            ready = np.maximum(before, self._ready_at(done))
            extra = self._conversion(piece * gradients)
            if is_sharded:
                exchanged = self._inside(piece * parameters) + self._inside(piece * gradients)
                extra = extra + self._beside(exchanged, ready - before)
            place = self._compute(ready - before, needs=last if blocks else None, extra=extra)
            before = ready
            if len(self.nodes) > 1:
                last = self._transfer(self.collectives.all_reduce, piece * gradients * self.wire_share, place)
        self._compute(np.maximum(0.0, self.time - before), needs=last if blocks else None)
        if self.converts:
            self._compute(np.zeros(len(self.time)), needs=last, extra=self._conversion(gradients))

    def _write_world_sharded(self) -> None:
        units = list(self.size.unit_bytes)
        whole, root = sum(units), self.size.root_bytes
        gradient_share = self.size.gradient_bytes / self.size.parameter_bytes * self.wire_share
        gather, reduce = self.collectives.gather, self.collectives.reduce_scatter
        forward = self.time * (1 - BACKWARD_SHARE)
        last: int | None = None  # the transfer that the next segment needs where nothing overlaps
        place = self._compute(self.optimizer + self.overhead)
        count = int(self.steps.max())
        for micro_batch in range(count):
            gathers = self.traits.gathers_twice or micro_batch == 0
            if gathers and root:
                last = self._transfer(gather, root, place)
            for index, unit in enumerate(units):
                if gathers:
                    last = self._transfer(gather, unit, self._gather_after(place, index))
                place = self._compute(forward * unit / whole, needs=last)
            for index, unit in enumerate(reversed(units)):
                if self.traits.gathers_twice:
                    last = self._transfer(gather, unit, self._gather_after(place, index))
                place = self._compute(
                    (self.time - forward) * unit / whole,
                    needs=last,
                    extra=self._conversion(unit * gradient_share) if micro_batch == count - 1 else 0.0,
                )
                if micro_batch == count - 1:
                    reduced = self._transfer(reduce, unit * gradient_share, place)
                    last = last if self.streams else reduced
            if root and micro_batch == count - 1:
                self._transfer(reduce, root * gradient_share, place)

    def _gather_after(self, place: int, index: int) -> int:
        """The segment after which a unit is gathered: the last one, or with streams the one before it."""
        return max(0, place - 1) if self.streams and index > 0 else place

    # What comes out

    def _play(self) -> StepPrediction:
        segments = [
            Segment(tuple(seconds.tolist()), needs) for seconds, needs in zip(self.segments, self.needs, strict=True)
        ]
        transfers = [
            Transfer(
                exchange.seconds(self.link),
                tuple(
                    handled * own.seconds_per_byte + own.seconds_per_collective
                    for handled, own in zip(exchange.handled_bytes, self.handling, strict=True)
                ),
                after,
            )
            for exchange, after in self.transfers
        ]
        played = play_step(segments, transfers, self.node_of_rank)
        compute = self.steps * self.time + self.overhead
        undisturbed = np.sum(self.segments, axis=0)
        communication = self.extra + np.maximum(0.0, np.array(played.busy_seconds) - undisturbed)
        wait = np.maximum(0.0, played.seconds - compute - self.optimizer - communication)
        columns = (compute, self.optimizer, communication, wait)
        sent = np.sum([exchange.sent_bytes for exchange, _ in self.transfers] or [[0.0] * len(self.nodes)], axis=0)
        return StepPrediction(
            played.seconds,
            tuple(RankStep(*map(float, values)) for values in zip(*columns, strict=True)),
            tuple(sent.tolist()),
            tuple(self.inside_bytes.tolist()),
        )
