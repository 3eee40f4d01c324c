# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""One training step played through: ranks that compute, transfers between them, and processors that both need.

A step is a list of segments of computing, the same for all ranks, and a list of transfers, which take turns. A
transfer begins when all ranks have finished a segment; a segment may need a transfer. Everything flows: between two
events all speeds are constant.

On machines without accelerators a transfer takes time of the processors that compute, for system calls, copies and
sums. It takes what it needs, at most half of what a node that computes has (threads share it fairly), and computing
goes on with the rest. So a transfer is as fast as the slowest of: the wire, and every node's processors.

Under a CPU quota (a container's, an emulated node's) a node that waits for less than the quota's period loses nothing:
it computes faster afterwards, until what it saved is used up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


#: Of a node's processors, for a transfer beside computing: two threads that always have work get half of it each.
_FAIR_SHARE = 0.5
_NOTHING = 1e-9  # seconds
_INTEGRATION_STEPS = 200


@dataclass(frozen=True, slots=True)
class Processors:
    """What a node can do beyond what its ranks' curves say.

    Args:
        peak: how many times faster a rank is while nothing holds it back: 1 / 0.3 with a quota of 30 % of a core.
        period_seconds: of the quota; 0: there is none.
    """

    peak: float = 1.0
    period_seconds: float = 0.0

    @property
    def credit_seconds(self) -> float:
        """Of waiting that can be made up for later, on average.

        What is left of a quota is lost at the end of its period. With the quota f = 1 / peak and a period P, a node
        that has waited until a time r before the end can use min(r, f P) of it instead of f r. The mean over all r is
        f P (1 - f) / 2 more, which are P (1 - f) / 2 of its usual speed.
        """
        return self.period_seconds * (1 - 1 / self.peak) / 2

    @classmethod
    def under_quota(
        cls, cores: float, ranks: int, period_seconds: float, available_cores: float = math.inf
    ) -> Processors:
        """A node whose `ranks`, of one thread each, share a quota of so many cores.

        Args:
            available_cores: what its quota could give it at most: its part of the machine that it shares with others.
        """
        peak = max(1.0, min(ranks, available_cores) / cores)
        return cls(peak, period_seconds if peak > 1 else 0.0)


def held_back_seconds(processors: Sequence[Processors]) -> float:
    """How long an exchange that all ranks wait for begins too late because quotas hold nodes back, on average.

    A node with the quota f of what it could use (f = 1 / peak) that has just computed has used up its quota with the
    probability 1 - f, and then waits for the rest of the period P, all waits from 0 to (1 - f) P being equally likely:
    it is ready within x with the probability min(1, f + x / P). Everybody waits for the last of the nodes, so the
    mean is the integral of 1 - prod_i min(1, f_i + x / P) over x.
    """
    period = max((node.period_seconds for node in processors), default=0.0)
    if period == 0.0:
        return 0.0
    parts = (np.arange(_INTEGRATION_STEPS) + 0.5) / _INTEGRATION_STEPS
    ready = np.prod([np.minimum(1.0, 1 / node.peak + parts) for node in processors], axis=0)
    return float(period * np.mean(1 - ready))


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
        held_back_seconds: how much longer it takes on the wire while a rank computes.
    """

    wire_seconds: float
    load_seconds: tuple[float, ...]
    after: int
    held_back_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """What came out.

    Args:
        seconds: until all segments and transfers are complete.
        busy_seconds: of each rank: computing, slowed down by transfers.
    """

    seconds: float
    busy_seconds: tuple[float, ...]


def play_step(
    segments: Sequence[Segment],
    transfers: Sequence[Transfer],
    node_of_rank: Sequence[int],
    processors: Sequence[Processors] | None = None,
) -> PlayedStep:
    """Plays a step through; where nodes save quota, after another one like it.

    Args:
        segments: what every rank computes, in order.
        transfers: what travels, in order, one after the other.
        node_of_rank: the node of each rank, from 0; ranks of one node share its processors.
        processors: of each node. None: nothing can be made up for.

    Raises:
        ValueError: a segment and a transfer wait for each other.
    """
    player = _Player(segments, transfers, node_of_rank, processors)
    played = player.play()
    return player.play() if player.most_credit.any() else played


class _Player:
    def __init__(
        self,
        segments: Sequence[Segment],
        transfers: Sequence[Transfer],
        node_of_rank: Sequence[int],
        processors: Sequence[Processors] | None,
    ) -> None:
        self.node = np.asarray(node_of_rank, dtype=int)
        self.ranks_of_node = np.bincount(self.node)
        count = len(self.ranks_of_node)
        self.work = np.array([segment.seconds for segment in segments], dtype=float).reshape(-1, len(self.node))
        self.needs = np.array([*(-1 if segment.needs is None else segment.needs for segment in segments), -1])
        self.transfers = transfers
        self.loads = [np.asarray(transfer.load_seconds, dtype=float) for transfer in transfers]
        processors = processors or [Processors()] * count
        self.peak = np.array([node.peak for node in processors])
        self.most_credit = np.array([node.credit_seconds for node in processors])
        self.credit = np.zeros(count)  # seconds of a node's processors that it has saved

    def play(self) -> PlayedStep:
        left_of_segment = self.work.copy()
        ranks, last = np.arange(len(self.node)), len(self.work)
        place = np.zeros(len(ranks), dtype=int)  # the segment that each rank is in
        turn, left_of_transfer = 0, 1.0  # the transfer whose turn it is
        now, busy = 0.0, np.zeros(len(ranks))
        while turn < len(self.transfers) or place.min() < last:
            computes = (place < last) & (self.needs[place] < turn)
            moves = turn < len(self.transfers) and place.min() > self.transfers[turn].after
            if not moves and not computes.any():
                raise ValueError("found segments and transfers that wait for each other: no order can end them")
            rate = self._transfer_rate(turn, computes) if moves else 0.0
            if math.isinf(rate):
                turn, left_of_transfer = turn + 1, 1.0
                continue
            used = rate * self.loads[turn] if moves else np.zeros(len(self.peak))
            speeds, saving = self._speeds(computes, used)
            active = ranks[computes]
            times = left_of_segment[place[active], active] / speeds[active]
            spending = saving < -_NOTHING
            until_spent = self.credit[spending & (self.credit > 0)] / -saving[spending & (self.credit > 0)]
            until_moved = [left_of_transfer / rate] if moves else []
            elapsed = min([*times, *until_spent, *until_moved])
            now += elapsed
            busy[active] += elapsed
            self.credit = np.clip(self.credit + saving * elapsed, 0.0, self.most_credit)
            self.credit[self.credit < _NOTHING] = 0.0
            left_of_segment[place[active], active] -= elapsed * speeds[active]
            # What is next ends exactly, whatever rounding left of it: otherwise time might stand still.
            place[active[times <= elapsed]] += 1
            if moves:
                left_of_transfer = 0.0 if until_moved[0] <= elapsed else left_of_transfer - rate * elapsed
                if left_of_transfer <= 0:
                    turn, left_of_transfer = turn + 1, 1.0
        return PlayedStep(now, tuple(busy.tolist()))

    def _computing(self, computes: np.ndarray) -> np.ndarray:
        """How many ranks of each node compute."""
        return np.bincount(self.node[computes], minlength=len(self.peak))

    def _transfer_rate(self, turn: int, computes: np.ndarray) -> float:
        """The part of a transfer that is done in a second."""
        free = np.where(self._computing(computes) > 0, _FAIR_SHARE, 1.0)
        free = np.where(self.credit > 0, free * self.peak, free)
        # A node that has saved quota is not stopped.
        held_back = computes.any() and not (self.credit[self.node[computes]] > 0).all()
        transfer = self.transfers[turn]
        wire_seconds = transfer.wire_seconds + (transfer.held_back_seconds if held_back else 0.0)
        seconds = max(wire_seconds, float((self.loads[turn] / free).max(initial=0.0)))
        return 1 / seconds if seconds > 0 else math.inf

    def _speeds(self, computes: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each rank, how fast it computes; of each node, how fast it saves processor time."""
        part = self._computing(computes) / self.ranks_of_node
        left = np.where(self.credit > 0, self.peak, 1.0) - used
        speed = np.minimum(self.peak, left / np.maximum(part, _NOTHING))
        return speed[self.node], 1.0 - used - part * speed
