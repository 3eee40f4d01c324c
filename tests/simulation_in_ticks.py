# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Steps for tests of the step simulation, and the same rules written down for every tick."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from accelerate_lshdp.planning.cost.step_simulation import Segment, Transfer


class Steady:
    """The processors of a node that is a machine of its own; with the attributes of the laboratory's `Processors`."""

    quota_cores = quota_speed = 1.0
    crowded_cores = 0.0

    def credit_seconds(self, nodes: int = 1) -> float:
        return 0.0

    def peak_beside(self, nodes: int) -> float:
        return 1.0


def step(seconds: list[list[float]], transfers: list[Transfer], needs: Sequence[int | None] = ()) -> tuple:
    """Segments of one rank a node: `seconds` has one row a segment."""
    needs = list(needs) or [None] * len(seconds)
    segments = [Segment(tuple(row), need) for row, need in zip(seconds, needs, strict=True)]
    return segments, transfers, list(range(len(seconds[0])))


def random_step(generator: random.Random, ranks: int) -> tuple[list[Segment], list[Transfer], list[int]]:
    """Segments and transfers in an order that can end."""
    count = generator.randint(1, 5)
    rows = [tuple(generator.choice([0.0, generator.uniform(0, 1)]) for _ in range(ranks)) for _ in range(count)]
    afters = sorted(generator.randint(0, count - 1) for _ in range(generator.randint(0, 4)))
    transfers = [
        Transfer(generator.uniform(0, 1), tuple(generator.uniform(0, 0.6) for _ in range(ranks)), after)
        for after in afters
    ]
    segments = []
    for place, row in enumerate(rows):
        possible = [number for number, after in enumerate(afters) if after < place]
        segments.append(Segment(row, generator.choice([None, *possible[-1:]])))
    return segments, transfers, list(range(ranks))


def in_tiny_steps(
    segments: Sequence[Segment],
    transfers: Sequence[Transfer],
    node_of_rank: Sequence[int],
    processors: Sequence[Any] | None = None,
    tick: float = 1e-3,
) -> float:
    """The same rules written down for every tick, one rank a node."""
    count = len(node_of_rank)
    processors = processors or [Steady()] * count
    crowd_cores = sum(node.crowded_cores for node in processors)
    credit = [0.0] * count
    for _ in range(2 if any(node.credit_seconds() for node in processors) else 1):
        place, left = [0] * count, [list(segment.seconds) for segment in segments]
        turn, rest, now = 0, 1.0, 0.0
        while turn < len(transfers) or min(place) < len(segments):
            ready = [
                place[rank] < len(segments)
                and (segments[place[rank]].needs is None or segments[place[rank]].needs < turn)
                for rank in range(count)
            ]
            wanted = sum(node.quota_cores for node, computes in zip(processors, ready, strict=True) if computes)
            full = [1.0 if wanted > crowd_cores else node.quota_speed for node in processors]
            has, peak = [], []
            for rank, node in enumerate(processors):
                left_for_later = node.credit_seconds() - node.credit_seconds(sum(ready))
                peak.append(max(full[rank], node.peak_beside(sum(ready))))
                has.append(peak[rank] if credit[rank] - left_for_later > 1e-9 else full[rank])
            moves = turn < len(transfers) and min(place) > transfers[turn].after
            done = 0.0
            if moves:
                slowest = transfers[turn].wire_seconds
                for node, load in enumerate(transfers[turn].load_seconds):
                    slowest = max(slowest, load / ((0.5 if ready[node] else 1.0) * has[node]))
                done = tick / slowest if slowest > 0 else 1.0
                rest -= done
            for rank, node in enumerate(processors):
                used = done * transfers[turn].load_seconds[rank] if moves else 0.0
                speed = 0.0
                if ready[rank]:
                    speed = min(peak[rank] * tick, has[rank] * tick - used)
                    left[place[rank]][rank] -= speed
                    if left[place[rank]][rank] <= 0:
                        place[rank] += 1
                saved = credit[rank] + full[rank] * tick - used - speed
                credit[rank] = min(node.credit_seconds(), max(0.0, saved))
            if moves and rest <= 1e-9:
                turn, rest = turn + 1, 1.0
            now += tick
    return now
