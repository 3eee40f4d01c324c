# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One training step played through: ranks that compute, transfers between them, and processors that both need.

A step is a list of segments of computing, the same for all ranks, and a list of transfers, which take turns. A
transfer begins when all ranks have finished a segment; a segment may need a transfer. Everything flows: between two
events all speeds are constant.

On machines without accelerators a transfer costs time of the processors that compute, for system calls, copies and
sums. While it runs, it takes what it needs, at most half of a processor that computes (threads share it fairly), and
the whole of one that waits; computing goes on with the rest. So a transfer is as fast as the slowest of: the wire, and
every node's processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


#: Of a processor, for a transfer beside computing: two threads that always have work get half of it each.
_FAIR_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of computing that all ranks do.

    Args:
        seconds: of each rank, undisturbed.
        needs: the transfer that has to be complete before, or None.
    """

    seconds: tuple[float, ...]
    needs: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """An exchange between nodes.

    Args:
        wire_seconds: what it takes if processors cost nothing.
        load_seconds: what it takes of the processors of each node if they do nothing else.
        after: the segment that all ranks have to finish before.
    """

    wire_seconds: float
    load_seconds: tuple[float, ...]
    after: int


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """What came out.

    Args:
        seconds: until all segments and transfers are complete.
        busy_seconds: of each rank: computing, slowed down by transfers.
    """

    seconds: float
    busy_seconds: tuple[float, ...]


def play_step(segments: Sequence[Segment], transfers: Sequence[Transfer], node_of_rank: Sequence[int]) -> PlayedStep:
    """Plays a step through.

    Args:
        segments: what every rank computes, in order.
        transfers: what travels, in order, one after the other.
        node_of_rank: the node of each rank; ranks of one node share its processors.

    Raises:
        ValueError: a segment and a transfer wait for each other.
    """
    nodes = np.asarray(node_of_rank)
    remaining = np.array([segment.seconds for segment in segments], dtype=float).reshape(len(segments), len(nodes))
    needs = np.array([-1 if segment.needs is None else segment.needs for segment in segments] + [-1])
    loads = [np.asarray(transfer.load_seconds, dtype=float) for transfer in transfers]
    place = np.zeros(len(nodes), dtype=int)  # the segment that each rank is in
    turn, left = 0, 1.0  # the transfer whose turn it is, and what is left of it
    now, busy = 0.0, np.zeros(len(nodes))
    ranks = np.arange(len(nodes))
    while turn < len(transfers) or place.min() < len(segments):
        computes = (place < len(segments)) & (needs[place] < turn)
        speeds = np.ones(len(nodes))
        moves = turn < len(transfers) and place.min() > transfers[turn].after
        rate = 0.0
        if moves:
            rate = _transfer_rate(transfers[turn].wire_seconds, loads[turn], nodes[computes])
            if math.isinf(rate):
                turn, left = turn + 1, 1.0
                continue
            speeds -= rate * loads[turn][nodes]
        if not moves and not computes.any():
            raise ValueError("found segments and transfers that wait for each other, expected an order that can end")
        active = ranks[computes]
        times = remaining[place[active], active] / speeds[active]
        elapsed = min([*times, *([left / rate] if moves else [])])
        now += elapsed
        busy[active] += elapsed
        remaining[place[active], active] -= elapsed * speeds[active]
        # What is next ends exactly, whatever rounding left of it: otherwise time might stand still.
        place[active[times <= elapsed]] += 1
        if moves:
            left -= rate * elapsed
            if left * (1 / rate) <= 1e-12 * now:
                turn, left = turn + 1, 1.0
    return PlayedStep(now, tuple(busy.tolist()))


def _transfer_rate(wire_seconds: float, load_seconds: np.ndarray, computing_nodes: np.ndarray) -> float:
    """The part of a transfer that is done in a second."""
    free = np.ones(len(load_seconds))
    free[computing_nodes] = _FAIR_SHARE
    seconds = max(wire_seconds, float((load_seconds / free).max(initial=0.0)))
    return 1 / seconds if seconds > 0 else math.inf
