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

Nodes that are emulated on one machine may together want more than it has to give. Then each of them gets a bit less
than its quota while all compute, and all of it while some wait; and those that compute share what there is beyond it.
What a node has saved and cannot use beside so many others is left for when there are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


#: Of a node's processors, for a transfer beside computing: two threads that always have work get half of it each.
_FAIR_SHARE = 0.5
_NOTHING = 1e-9  # seconds


@dataclass(frozen=True, slots=True)
class Processors:
    """What a node can do beyond what its ranks' curves say.

    Args:
        peak: how many times faster a rank is while nothing holds it back: 1 / 0.3 with a quota of 30 % of a core.
        period_seconds: of the quota; 0: there is none.
        quota_cores: CPU seconds per second that the quota allows, and the node's ranks can use.
        machine_cores: of the machine, if other nodes share it.
        crowded_cores: what the node got of that machine while all nodes computed, as when curves were measured; 0: its
            quota.
    """

    peak: float = 1.0
    period_seconds: float = 0.0
    quota_cores: float = 1.0
    machine_cores: float = math.inf
    crowded_cores: float = 0.0

    @property
    def quota_speed(self) -> float:
        """How many times faster a rank is while the machine has the whole quota for its node."""
        return max(1.0, self.quota_cores / self.crowded_cores) if self.crowded_cores > 0 else 1.0

    def peak_beside(self, nodes: int) -> float:
        """The peak while so many nodes compute, this one included, and share the machine."""
        return min(self.peak, max(1.0, self.machine_cores / max(1, nodes) / self.quota_cores))

    def credit_seconds(self, nodes: int = 1) -> float:
        """Of waiting that can be made up for later, on average, beside so many nodes that compute.

        With the quota f = 1 / peak and a period P, a node that has waited until a time r before the period's end can
        use min(r, f P) of it instead of f r. The mean over all r is f P (1 - f) / 2 more. And it ends computing while
        its quota lasts, never while it is stopped: on average with half of a quota's time f P used, in which it did
        what usually takes 1 / f times as long, P (1 - f) / 2 more than that. Together P (1 - f) of its usual speed.
        """
        return self.period_seconds * (1 - 1 / self.peak_beside(nodes))

    @classmethod
    def under_quota(
        cls,
        cores: float,
        ranks: int,
        period_seconds: float,
        machine_cores: float = math.inf,
        crowded_cores: float = 0.0,
    ) -> Processors:
        """A node whose `ranks`, of one thread each, share a quota of so many cores.

        Args:
            machine_cores, crowded_cores: see the class.
        """
        peak = max(1.0, min(ranks, machine_cores) / cores)
        usable = min(cores, ranks, machine_cores)
        return cls(peak, period_seconds if peak > 1 else 0.0, usable, machine_cores, crowded_cores)


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
class SimulatedStep:
    """What came out.

    Args:
        seconds: until all segments and transfers are complete.
        busy_seconds: of each rank: computing, slowed down by transfers.
    """

    seconds: float
    busy_seconds: tuple[float, ...]


def simulate_step(
    segments: Sequence[Segment],
    transfers: Sequence[Transfer],
    node_of_rank: Sequence[int],
    processors: Sequence[Processors] | None = None,
) -> SimulatedStep:
    """Plays a step through; where nodes save quota, after another one like it.

    Args:
        segments: what every rank computes, in order.
        transfers: what travels, in order, one after the other.
        node_of_rank: the node of each rank, from 0; ranks of one node share its processors.
        processors: of each node. None: nothing can be made up for.

    Raises:
        ValueError: a segment and a transfer wait for each other.
    """
    simulator = _StepSimulator(segments, transfers, node_of_rank, processors)
    simulated = simulator.simulate()
    return simulator.simulate() if simulator.most_credit.any() else simulated


class _StepSimulator:
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
        self.quota_speed = np.array([node.quota_speed for node in processors])
        self.quota_cores = np.array([node.quota_cores for node in processors])
        self.crowd_cores = sum(node.crowded_cores for node in processors)
        # By the number of nodes that compute: each node's peak, and the credit that it can use then.
        beside = range(count + 1)
        self.peaks = np.array([[node.peak_beside(nodes) for node in processors] for nodes in beside])
        self.credits = np.array([[node.credit_seconds(nodes) for node in processors] for nodes in beside])
        self.most_credit = self.credits[0]
        self.credit = np.zeros(count)  # seconds of a node's processors that it has saved

    def simulate(self) -> SimulatedStep:
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
            self._update_computing_nodes(computes)
            rate = self._transfer_rate(turn) if moves else 0.0
            if math.isinf(rate):
                turn, left_of_transfer = turn + 1, 1.0
                continue
            used = rate * self.loads[turn] if moves else np.zeros(len(self.peak))
            speeds, saving = self._speeds(used)
            active = ranks[computes]
            times = left_of_segment[place[active], active] / speeds[active]
            spending = (saving < -_NOTHING) & (self.usable > 0)
            until_spent = self.usable[spending] / -saving[spending]
            until_moved = [left_of_transfer / rate] if moves else []
            elapsed = min([*times, *until_spent, *until_moved])
            now += elapsed
            busy[active] += elapsed
            self.credit = np.clip(self.credit + saving * elapsed, 0.0, self.most_credit)
            left_of_segment[place[active], active] -= elapsed * speeds[active]
            # What is next ends exactly, whatever rounding left of it: otherwise time might stand still.
            place[active[times <= elapsed]] += 1
            if moves:
                left_of_transfer = 0.0 if until_moved[0] <= elapsed else left_of_transfer - rate * elapsed
                if left_of_transfer <= 0:
                    turn, left_of_transfer = turn + 1, 1.0
        return SimulatedStep(float(now), tuple(busy.tolist()))

    def _update_computing_nodes(self, computes: np.ndarray) -> None:
        """What follows for each node from which ranks compute."""
        self.computing = np.bincount(self.node[computes], minlength=len(self.quota_speed))  # of its ranks
        nodes = np.count_nonzero(self.computing)
        is_crowded = self.quota_cores[self.computing > 0].sum() > self.crowd_cores
        self.full = np.ones(len(self.quota_speed)) if is_crowded else self.quota_speed
        self.peak = np.maximum(self.full, self.peaks[nodes])
        # What a node cannot use beside so many others is left for later, when there are fewer.
        self.usable = self.credit - (self.most_credit - self.credits[nodes])
        self.usable[self.usable < _NOTHING] = 0.0

    def _transfer_rate(self, turn: int) -> float:
        """The part of a transfer that is done in a second."""
        free = np.where(self.computing > 0, _FAIR_SHARE, 1.0)
        free = free * np.where(self.usable > 0, self.peak, self.full)
        # A node that has saved quota is not stopped.
        held_back = ((self.computing > 0) & (self.usable == 0)).any()
        transfer = self.transfers[turn]
        wire_seconds = transfer.wire_seconds + (transfer.held_back_seconds if held_back else 0.0)
        seconds = max(wire_seconds, float((self.loads[turn] / free).max(initial=0.0)))
        return 1 / seconds if seconds > 0 else math.inf

    def _speeds(self, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each rank, how fast it computes; of each node, how fast it saves processor time."""
        part = self.computing / self.ranks_of_node
        left = np.where(self.usable > 0, self.peak, self.full) - used
        speed = np.minimum(self.peak, left / np.maximum(part, _NOTHING))
        return speed[self.node], self.full - used - part * speed
