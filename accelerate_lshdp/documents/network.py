# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a collective costs: the bytes that every node sends, and the seconds that they take on the wire.

A message of B bytes takes alpha + beta * B seconds (Hockney's model). Nodes send and receive at the same time, so a
collective takes as long as the node that sends most. N nodes with L ranks each, W ranks in all, a payload of S bytes:

    ring all-reduce over all ranks        2 (W-1)/W * S   leave a node, as a ring of neighbours leaves it once
    ring all-gather over all ranks          (W-1)/W * S
    reduce-scatter by all-to-all          L (N-1)/N * S   every rank sends to every rank of the other nodes
    all-reduce of shards between nodes    2 (N-1)/N * S   L rings, each over one rank a node with 1/L of the payload
    two-stage all-gather, reduce-scatter    (N-1)/N * S   between nodes first (last), inside them afterwards (before)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


#: What is left of a link's rate for content: 1448 of the 1514 bytes of a full Ethernet frame with TCP and timestamps.
PAYLOAD_SHARE = 1448 / 1514


@dataclass(frozen=True, slots=True)
class Link:
    """How long a message takes: latency_seconds + bytes * seconds_per_byte.

    Raises:
        ValueError: a value is negative or not finite.
    """

    latency_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "seconds_per_byte"):
            value = float(getattr(self, name))
            if not 0 <= value < math.inf:
                raise ValueError(f"found {name} {value}, expected a finite number of at least 0: correct the link")
            object.__setattr__(self, name, value)

    @classmethod
    def from_rate(cls, bits_per_second: float, delay_seconds: float = 0.0) -> Link:
        """A link of a given rate (1 Gb/s = 1e9), with what frames and headers take of it.

        Raises:
            ValueError: the rate is not positive, or the delay is negative.
        """
        if not 0 < bits_per_second < math.inf:
            raise ValueError(f"found a rate of {bits_per_second} bit/s, expected a positive one: correct the link")
        return cls(delay_seconds, 8 / (bits_per_second * PAYLOAD_SHARE))

    @classmethod
    def from_all_reduce(cls, latency_seconds: float, seconds_per_byte: float, nodes: Sequence[int]) -> Link:
        """The link behind a measured all-reduce (latency + payload bytes * seconds_per_byte) over all ranks.

        Better than its rate, where that is not all that holds bytes up.

        Raises:
            ValueError: there are fewer than two nodes, so nothing travelled between nodes.
        """
        ring = ring_all_reduce(1.0, nodes)
        if len(nodes) < 2:
            raise ValueError(f"found {len(nodes)} node, expected an all-reduce between nodes")
        return cls(latency_seconds / ring.rounds, seconds_per_byte / max(ring.sent_bytes))

    def seconds(self, size: float, rounds: int = 1) -> float:
        """Of `size` bytes in `rounds` messages that wait for each other."""
        return rounds * self.latency_seconds + size * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective as every node sees it.

    Args:
        sent_bytes: what each node sends to other nodes; it receives as much.
        handled_bytes: what the ranks of each node send, to their own node too: the work of its processors.
        rounds: messages that wait for each other.
        inside_bytes: the part of `handled_bytes` that each node exchanges in a stage of its own, while nothing travels
            between nodes. Empty: nothing.
    """

    sent_bytes: tuple[float, ...]
    handled_bytes: tuple[float, ...]
    rounds: int
    inside_bytes: tuple[float, ...] = ()

    def seconds(self, link: Link) -> float:
        """On the wire between nodes: as long as the node that sends most."""
        size = max(self.sent_bytes)
        return link.seconds(size, self.rounds) if size > 0 else 0.0


#: (payload bytes, ranks on each node) -> what every node does.
Collective = Callable[[float, Sequence[int]], Exchange]


def ring_all_reduce(payload: float, nodes: Sequence[int]) -> Exchange:
    """One ring over all ranks, neighbours on the same node where possible."""
    return _ring(payload, nodes, passes=2)


def ring_all_gather(payload: float, nodes: Sequence[int]) -> Exchange:
    """One ring over all ranks; `payload` is what every rank has afterwards."""
    return _ring(payload, nodes, passes=1)


def all_to_all(payload: float, nodes: Sequence[int]) -> Exchange:
    """Every rank sends every other one its part of `payload`, all at once: a reduce-scatter, the sums aside."""
    world = sum(nodes)
    return Exchange(
        tuple(size * (world - size) / world * payload for size in nodes),
        tuple(size * (world - 1) / world * payload for size in nodes),
        rounds=1,
    )


def shard_all_reduce(payload: float, nodes: Sequence[int]) -> Exchange:
    """Rings over one rank a node, each with its part of `payload`.

    Raises:
        ValueError: nodes have different numbers of ranks, so their shards do not match.
    """
    count = _equal_nodes(nodes)
    sent = 2 * (count - 1) / count * payload
    return Exchange((sent,) * count, (sent,) * count, rounds=2 * (count - 1))


def quantised_all_reduce(payload: float, nodes: Sequence[int]) -> Exchange:
    """As `shard_all_reduce`, but by all-to-all, sums and all-gather: what is rounded cannot be added on its way.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    count = _equal_nodes(nodes)
    sent = 2 * (count - 1) / count * payload
    return Exchange((sent,) * count, (sent,) * count, rounds=count)


def two_stage_all_gather(payload: float, nodes: Sequence[int]) -> Exchange:
    """Between the nodes first, every rank its part; then inside each node.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    return _two_stage(payload, nodes, rounds=len(nodes) - 1)


def two_stage_reduce_scatter(payload: float, nodes: Sequence[int]) -> Exchange:
    """Inside each node first; then between the nodes, by all-to-all.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    return _two_stage(payload, nodes, rounds=1)


def _ring(payload: float, nodes: Sequence[int], passes: int) -> Exchange:
    world = sum(nodes)
    each = passes * (world - 1) / world * payload
    sent = each if len(nodes) > 1 else 0.0
    return Exchange((sent,) * len(nodes), tuple(size * each for size in nodes), rounds=passes * (world - 1))


def _two_stage(payload: float, nodes: Sequence[int], rounds: int) -> Exchange:
    count = _equal_nodes(nodes)
    sent, inside = (count - 1) / count * payload, (nodes[0] - 1) * payload
    return Exchange((sent,) * count, (sent + inside,) * count, rounds, (inside,) * count if inside else ())


def _equal_nodes(nodes: Sequence[int]) -> int:
    if len(set(nodes)) != 1:
        raise ValueError(
            f"found nodes with {list(nodes)} ranks, expected the same number on each: use a collective over all ranks"
        )
    return len(nodes)
