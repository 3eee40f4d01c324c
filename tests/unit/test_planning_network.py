# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What collectives cost, against messages that are counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest

from accelerate_lshdp.documents.network import (
    PAYLOAD_SHARE,
    Collective,
    LinkCost,
    all_to_all,
    quantised_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    shard_all_reduce,
    two_stage_all_gather,
    two_stage_reduce_scatter,
)


PAYLOAD = 1200.0
Message = tuple[int, int, float]  # from, to, bytes


def ring(ranks: Sequence[int], payload: float, passes: int) -> Iterable[Message]:
    """In every round each rank hands one of as many chunks as there are ranks to its neighbour."""
    for _ in range(passes * (len(ranks) - 1)):
        for place, rank in enumerate(ranks):
            yield rank, ranks[(place + 1) % len(ranks)], payload / len(ranks)


def everybody(ranks: Sequence[int], payload: float) -> Iterable[Message]:
    for sender in ranks:
        for receiver in ranks:
            if sender != receiver:
                yield sender, receiver, payload / len(ranks)


def ranks_of(nodes: Sequence[int]) -> list[list[int]]:
    ranks = iter(range(sum(nodes)))
    return [[next(ranks) for _ in range(size)] for size in nodes]


def places(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    return list(zip(*ranks_of(nodes), strict=True))


def parts(nodes: Sequence[int]) -> list[tuple[tuple[int, ...], float]]:
    """One rank a node for each part of the payload, which the ranks of a node take in turn."""
    count = max(nodes)
    return [(tuple(ranks[p % len(ranks)] for ranks in ranks_of(nodes)), PAYLOAD / count) for p in range(count)]


def two_stages(nodes: Sequence[int], payload: float, between: Callable[..., Iterable[Message]]) -> Iterable[Message]:
    """Ranks of one place exchange a node's part of the payload; then each node all of it."""
    for group in places(nodes):
        yield from between(group, payload / nodes[0])
    for group in ranks_of(nodes):
        yield from everybody(group, payload)


MESSAGES: dict[Collective, Callable[[Sequence[int]], Iterable[Message]]] = {
    ring_all_reduce: lambda nodes: ring(range(sum(nodes)), PAYLOAD, 2),
    ring_all_gather: lambda nodes: ring(range(sum(nodes)), PAYLOAD, 1),
    all_to_all: lambda nodes: everybody(range(sum(nodes)), PAYLOAD),
    shard_all_reduce: lambda nodes: (m for group, part in parts(nodes) for m in ring(group, part, 2)),
    quantised_all_reduce: lambda nodes: (
        m for group, part in parts(nodes) for m in [*everybody(group, part), *ring(group, part, 1)]
    ),
    two_stage_all_gather: lambda nodes: two_stages(nodes, PAYLOAD, lambda group, part: ring(group, part, 1)),
    two_stage_reduce_scatter: lambda nodes: two_stages(nodes, PAYLOAD, everybody),
}
EVEN_ONLY = (two_stage_all_gather, two_stage_reduce_scatter)


@pytest.mark.parametrize("nodes", [(1,), (2,), (1, 1), (1, 1, 1, 1), (2, 2), (3, 3), (2, 2, 2), (1, 2), (2, 1, 3)])
@pytest.mark.parametrize("collective", MESSAGES, ids=lambda collective: collective.__name__)
def test_bytes_are_those_of_all_messages(collective: Collective, nodes: tuple[int, ...]) -> None:
    if len(set(nodes)) > 1 and collective in EVEN_ONLY:
        with pytest.raises(ValueError, match="expected the same number on each"):
            collective(PAYLOAD, nodes)
        return
    node_of = {rank: node for node, ranks in enumerate(ranks_of(nodes)) for rank in ranks}
    sent, handled, received = Counter(), Counter(), Counter()
    for sender, receiver, size in MESSAGES[collective](nodes):
        handled[node_of[sender]] += size
        if node_of[sender] != node_of[receiver]:
            sent[node_of[sender]] += size
            received[node_of[receiver]] += size
    exchange = collective(PAYLOAD, nodes)
    assert exchange.sent_bytes == pytest.approx([sent[node] for node in range(len(nodes))])
    assert exchange.sent_bytes == pytest.approx([received[node] for node in range(len(nodes))])
    assert exchange.handled_bytes == pytest.approx([handled[node] for node in range(len(nodes))])


def test_seconds_of_known_networks() -> None:
    # 300 M parameters in fp16 on 4 nodes at 1 Gb/s: 600 MB, 2 * 3/4 of them, at 125 MB/s.
    wire = LinkCost(0.0, 8e-9)
    assert ring_all_reduce(600e6, [1] * 4).seconds(wire) == pytest.approx(7.2)
    # What full sharding sends there: two all-gathers and a reduce-scatter.
    gathers = 2 * ring_all_gather(600e6, [1] * 4).seconds(wire)
    assert gathers + all_to_all(600e6, [1] * 4).seconds(wire) == pytest.approx(10.8)
    # Latency counts once for every message that waits for another one.
    slow = LinkCost(0.5, 0.0)
    assert ring_all_reduce(1.0, [1] * 4).seconds(slow) == pytest.approx(6 * 0.5)
    assert all_to_all(1.0, [1] * 4).seconds(slow) == pytest.approx(0.5)
    # A node alone has nobody to send to.
    assert ring_all_reduce(1e9, [4]).seconds(LinkCost(0.5, 1.0)) == 0.0


def test_two_stages_halve_what_two_nodes_of_two_ranks_send() -> None:
    # Measured on gloo: 38 MB for each 12.6 MB of parameters when flat (its reduce-scatter is an all-reduce), then 19.
    nodes, payload = (2, 2), 12.6
    flat = 2 * ring_all_gather(payload, nodes).sent_bytes[0] + ring_all_reduce(payload, nodes).sent_bytes[0]
    staged = (
        2 * two_stage_all_gather(payload, nodes).sent_bytes[0] + two_stage_reduce_scatter(payload, nodes).sent_bytes[0]
    )
    assert flat == pytest.approx(37.8)
    assert staged == pytest.approx(18.9)


def test_link_from_a_rate_and_from_a_measured_all_reduce() -> None:
    link = LinkCost.from_rate(1e9, 0.001)
    assert 8 / link.seconds_per_byte / 1e6 == pytest.approx(957, abs=1)  # as iperf3 measured
    assert link.latency_seconds == 0.001
    assert PAYLOAD_SHARE < 1
    again = LinkCost.from_all_reduce(
        ring_all_reduce(0.0, [1, 2]).rounds * 0.001, ring_all_reduce(1.0, [1, 2]).seconds(link) - 4 * 0.001, [1, 2]
    )
    assert again.latency_seconds == pytest.approx(link.latency_seconds)
    assert again.seconds_per_byte == pytest.approx(link.seconds_per_byte)
    for wrong in (lambda: LinkCost(-1, 0), lambda: LinkCost(0, float("nan")), lambda: LinkCost.from_rate(0)):
        with pytest.raises(ValueError, match="correct the link"):
            wrong()
    with pytest.raises(ValueError, match="between nodes"):
        LinkCost.from_all_reduce(0, 1, [4])
