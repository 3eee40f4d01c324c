# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The cost of collectives: bytes that every node sends, and seconds that they take on the wire.

A message of B bytes takes alpha + beta * B seconds (Hockney's model). Nodes send and receive at the same time, so a
collective takes as long as the node that sends most. N nodes with L ranks each, W ranks in all, a payload of S bytes:

    ring all-reduce over all ranks        2 (W-1)/W * S   leave a node, as a ring of neighbours leaves it once
    ring all-gather over all ranks          (W-1)/W * S
    reduce-scatter by all-to-all          L (N-1)/N * S   every rank sends to every rank of the other nodes
    all-reduce between nodes              2 (N-1)/N * S   rings over one rank a node, each with a part of the payload
    two-stage all-gather, reduce-scatter    (N-1)/N * S   between nodes first (last), inside them afterwards (before)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


#: The part of a link's rate that is left for content: 1448 of the 1514 bytes of a full Ethernet frame that carries TCP
#: with timestamps.
PAYLOAD_SHARE = 1448 / 1514


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A network link on which a message takes latency_seconds + bytes * seconds_per_byte.

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
    def from_rate(cls, bits_per_second: float, delay_seconds: float = 0.0) -> LinkCost:
        """A link of a given rate (1 Gb/s = 1e9), less the part that frames and headers take.

        Raises:
            ValueError: the rate is not positive, or the delay is negative.
        """
        if not 0 < bits_per_second < math.inf:
            raise ValueError(f"found a rate of {bits_per_second} bit/s, expected a positive one: correct the link")
        return cls(delay_seconds, 8 / (bits_per_second * PAYLOAD_SHARE))

    @classmethod
    def from_all_reduce(cls, latency_seconds: float, seconds_per_byte: float, nodes: Sequence[int]) -> LinkCost:
        """The link that explains a measured all-reduce (latency + payload bytes * seconds_per_byte) over all ranks.

        It contains all that slows messages down (system calls, busy switches), where `from_rate` knows the rate only.

        Raises:
            ValueError: there are fewer than two nodes, so nothing travelled between nodes.
        """
        ring = ring_all_reduce(1.0, nodes)
        if len(nodes) < 2:
            raise ValueError(f"found {len(nodes)} node, expected an all-reduce between nodes")
        # A ring of rounds messages pays the latency once a round; every node sends max(sent_bytes) for one byte.
        return cls(latency_seconds / ring.rounds, seconds_per_byte / max(ring.sent_bytes))

    def seconds(self, size: float, rounds: int = 1) -> float:
        """Seconds of `size` bytes in `rounds` messages, each of which waits for the one before it."""
        return rounds * self.latency_seconds + size * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Exchange:
    """The bytes and messages of one collective on every node; tuples have one entry a node.

    Args:
        sent_bytes: bytes that each node sends to other nodes; it receives as many.
        handled_bytes: bytes that the ranks of each node send, to ranks of the same node too: the work of its
            processors.
        rounds: number of messages that wait for each other.
        inside_bytes: the part of `handled_bytes` that each node exchanges in a stage of its own, while nothing travels
            between nodes. Empty: nothing.
    """

    sent_bytes: tuple[float, ...]
    handled_bytes: tuple[float, ...]
    rounds: int
    inside_bytes: tuple[float, ...] = ()

    def seconds(self, link: LinkCost) -> float:
        """Seconds on the wire between nodes: those of the node that sends most."""
        # Links are full duplex and nodes send at the same time, so sums over nodes do not matter.
        size = max(self.sent_bytes)
        return link.seconds(size, self.rounds) if size > 0 else 0.0


#: A function of (payload bytes, ranks on each node): the exchange that it takes.
Collective = Callable[[float, Sequence[int]], Exchange]


def ring_all_reduce(payload: float, nodes: Sequence[int]) -> Exchange:
    """All-reduce in one ring over all ranks, in which ranks of a node are neighbours."""
    return _ring(payload, nodes, passes=2)


def ring_all_gather(payload: float, nodes: Sequence[int]) -> Exchange:
    """All-gather in one ring over all ranks; `payload` is the number of bytes that every rank has afterwards."""
    return _ring(payload, nodes, passes=1)


def all_to_all(payload: float, nodes: Sequence[int]) -> Exchange:
    """Reduce-scatter by all-to-all: every rank sends every other one its part of `payload`, all at once."""
    world = sum(nodes)
    return Exchange(
        tuple(size * (world - size) / world * payload for size in nodes),
        tuple(size * (world - 1) / world * payload for size in nodes),
        rounds=1,
    )


def shard_all_reduce(payload: float, nodes: Sequence[int]) -> Exchange:
    """All-reduce of shards, or of what nodes have summed: rings over one rank a node, each with its part of `payload`.

    Nodes may have different numbers of ranks: the ranks of a node take their parts in turn.
    """
    count = len(nodes)
    sent = 2 * (count - 1) / count * payload
    return Exchange((sent,) * count, (sent,) * count, rounds=2 * (count - 1))


def quantised_all_reduce(payload: float, nodes: Sequence[int]) -> Exchange:
    """`shard_all_reduce` in two messages: all-to-all, sums, all-gather, for formats whose values cannot be added."""
    count = len(nodes)
    sent = 2 * (count - 1) / count * payload
    return Exchange((sent,) * count, (sent,) * count, rounds=count)


def two_stage_all_gather(payload: float, nodes: Sequence[int]) -> Exchange:
    """All-gather in two stages: every rank its part between the nodes; then inside each node.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    return _two_stage(payload, nodes, rounds=len(nodes) - 1)


def two_stage_reduce_scatter(payload: float, nodes: Sequence[int]) -> Exchange:
    """Reduce-scatter in two stages: inside each node; then between the nodes, by all-to-all.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    return _two_stage(payload, nodes, rounds=1)


def inside_all_gather(payload: float, nodes: Sequence[int]) -> Exchange:
    """All-gather inside each node alone, as a second stage without a first: every rank its part of the node's copy."""
    inside = tuple((count - 1) * payload for count in nodes)
    return Exchange((0.0,) * len(nodes), inside, rounds=0, inside_bytes=inside if any(inside) else ())


def _ring(payload: float, nodes: Sequence[int], passes: int) -> Exchange:
    world = sum(nodes)
    each = passes * (world - 1) / world * payload
    # A ring that visits node after node leaves each node once, whatever the number of its ranks.
    sent = each if len(nodes) > 1 else 0.0
    return Exchange((sent,) * len(nodes), tuple(size * each for size in nodes), rounds=passes * (world - 1))


def _two_stage(payload: float, nodes: Sequence[int], rounds: int) -> Exchange:
    count = _equal_nodes(nodes)
    # Inside a node each of its L ranks sends (L-1)/L of the payload: L-1 payloads in all.
    sent, inside = (count - 1) / count * payload, (nodes[0] - 1) * payload
    return Exchange((sent,) * count, (sent + inside,) * count, rounds, (inside,) * count if inside else ())


def _equal_nodes(nodes: Sequence[int]) -> int:
    if len(set(nodes)) != 1:
        raise ValueError(
            f"found nodes with {list(nodes)} ranks, expected the same number on each: use a collective over all ranks"
        )
    return len(nodes)
