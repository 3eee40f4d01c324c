# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Event-driven simulation of one training step: ranks that compute, transfers between nodes, and shared processors.

A step is a list of segments of computing, the same for all ranks, and a list of transfers, one of which runs at a
time. A transfer begins when all ranks have finished a segment; a segment may need a transfer. Between two events all
speeds are constant, so the simulation goes from event to event (a fluid model).

On machines without accelerators a transfer uses the processors that compute, for system calls, copies and sums. It
gets at most half of the processors of a node that computes (threads share them fairly), and computing goes on with the
rest. So a transfer is as fast as the slowest of the wire and every node's processors.

A CPU quota (a container's, an emulated node's) limits CPU seconds per period. A node that waits for less than a period
saves quota, and computes faster than its quota afterwards until the saved credit is used up.

Nodes that are emulated on one machine may together want more than the machine has. Then each of them gets a little
less than its quota while all compute, and all of it while some wait; nodes that compute share the capacity beyond
that. Credit that a node cannot use beside so many others is kept until fewer nodes compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


#: The part of a node's processors that a transfer gets beside computing: the scheduler gives two busy threads half
#: each.
_FAIR_SHARE = 0.5
_NOTHING = 1e-9  # seconds; below it, credit is a remainder of rounding


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of a node under a CPU quota, relative to the speed that its ranks' curves were measured at.

    Args:
        peak: factor by which a rank is faster while no quota stops it: 1 / 0.3 with a quota of 30 % of a core.
        period_seconds: seconds of the quota's period; 0: there is no quota.
        quota_cores: CPU seconds per second that the quota allows and that the node's ranks can use.
        machine_cores: cores of the machine, if other emulated nodes share it.
        crowded_cores: CPU seconds per second that the node got while all nodes computed, as when the curves were
            measured; 0: its quota.
    """

    peak: float = 1.0
    period_seconds: float = 0.0
    quota_cores: float = 1.0
    machine_cores: float = math.inf
    crowded_cores: float = 0.0

    @property
    def quota_speed(self) -> float:
        """The factor by which a rank is faster than measured while the machine can give its node the whole quota."""
        return max(1.0, self.quota_cores / self.crowded_cores) if self.crowded_cores > 0 else 1.0

    def peak_beside(self, nodes: int) -> float:
        """The peak speed while `nodes` nodes compute, this one included, and share the machine."""
        return min(self.peak, max(1.0, self.machine_cores / max(1, nodes) / self.quota_cores))

    def credit_seconds(self, nodes: int = 1) -> float:
        """Seconds of waiting that a node can make up for later, on average, beside `nodes` nodes that compute.

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
        """A node whose `ranks`, of one thread each, share a quota of `cores` cores.

        Args:
            cores: CPU seconds per second that the quota allows.
            ranks: number of ranks of the node.
            period_seconds: seconds of the quota's period.
            machine_cores, crowded_cores: as in the class.
        """
        # One thread uses one core at most: a quota that the ranks cannot use up stops nobody and saves nothing.
        peak = max(1.0, min(ranks, machine_cores) / cores)
        usable = min(cores, ranks, machine_cores)
        return cls(peak, period_seconds if peak > 1 else 0.0, usable, machine_cores, crowded_cores)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the computing of a step, which all ranks do.

    Args:
        seconds: seconds of each rank without transfers beside it.
        needs: index of the transfer that has to be complete before the segment begins, or None.
    """

    seconds: tuple[float, ...]
    needs: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """An exchange between nodes.

    Args:
        wire_seconds: seconds on the wire.
        load_seconds: seconds that it takes of the processors of each node if they do nothing else.
        after: index of the segment that all ranks have to finish before the transfer begins.
        held_back_seconds: seconds that it takes longer on the wire while a rank computes.
    """

    wire_seconds: float
    load_seconds: tuple[float, ...]
    after: int
    held_back_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The result of a simulated step.

    Args:
        seconds: seconds until all segments and transfers are complete.
        busy_seconds: seconds in which each rank computes, slowed down by transfers.
    """

    seconds: float
    busy_seconds: tuple[float, ...]


def simulate_step(
    segments: Sequence[Segment],
    transfers: Sequence[Transfer],
    node_of_rank: Sequence[int],
    processors: Sequence[Processors] | None = None,
) -> SimulatedStep:
    """Simulates one step of many equal ones.

    Args:
        segments: the computing of every rank, in order.
        transfers: the exchanges, in order, one after the other.
        node_of_rank: the node of each rank, from 0; ranks of one node share its processors.
        processors: the processors of each node. None: no node has a quota.

    Raises:
        ValueError: a segment and a transfer wait for each other.
    """
    simulator = _StepSimulator(segments, transfers, node_of_rank, processors)
    # Credit at the end of a step is there at the start of the next: the second step is the one in the middle of a run.
    simulated = simulator.simulate()
    return simulator.simulate() if simulator.most_credit.any() else simulated


class _StepSimulator:
    """The state of a simulation: progress of segments and transfers, and the credit of each node.

    Arrays have one entry a node, or one a rank where a comment says so.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        transfers: Sequence[Transfer],
        node_of_rank: Sequence[int],
        processors: Sequence[Processors] | None,
    ) -> None:
        self.node = np.asarray(node_of_rank, dtype=int)  # of each rank
        self.ranks_of_node = np.bincount(self.node)
        count = len(self.ranks_of_node)
        # Seconds, shape [segments, ranks]; `needs` ends with an entry for ranks that have no segment left.
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
        """Simulates one step; credit is kept for the next call."""
        left_of_segment = self.work.copy()
        ranks, last = np.arange(len(self.node)), len(self.work)
        place = np.zeros(len(ranks), dtype=int)  # the segment that each rank is in
        turn, left_of_transfer = 0, 1.0  # the transfer whose turn it is
        now, busy = 0.0, np.zeros(len(ranks))
        while turn < len(self.transfers) or place.min() < last:
            # A rank computes if the transfer that its segment needs has had its turn; -1 at the end stands for none.
            computes = (place < last) & (self.needs[place] < turn)
            moves = turn < len(self.transfers) and place.min() > self.transfers[turn].after
            if not moves and not computes.any():
                raise ValueError("found segments and transfers that wait for each other: no order can end them")
            self._update_computing_nodes(computes)
            rate = self._transfer_rate(turn) if moves else 0.0
            # A transfer without bytes ends at once, and would divide by zero below.
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
            # The next event: a segment ends, a node's credit is spent, or the transfer ends.
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
        """Updates each node's speeds and usable credit for the ranks that compute now."""
        self.computing = np.bincount(self.node[computes], minlength=len(self.quota_speed))  # of its ranks
        nodes = np.count_nonzero(self.computing)
        # All that compute want more than they got together when curves were measured: their measured speed stays.
        is_crowded = self.quota_cores[self.computing > 0].sum() > self.crowd_cores
        self.full = np.ones(len(self.quota_speed)) if is_crowded else self.quota_speed
        self.peak = np.maximum(self.full, self.peaks[nodes])
        # What a node cannot use beside so many others is left for later, when there are fewer.
        self.usable = self.credit - (self.most_credit - self.credits[nodes])
        self.usable[self.usable < _NOTHING] = 0.0

    def _transfer_rate(self, turn: int) -> float:
        """The part of transfer `turn` that is done in one second; infinite if it takes no time."""
        free = np.where(self.computing > 0, _FAIR_SHARE, 1.0)
        free = free * np.where(self.usable > 0, self.peak, self.full)
        # A node that has saved quota is not stopped, so its messages do not wait for the next period.
        held_back = ((self.computing > 0) & (self.usable == 0)).any()
        transfer = self.transfers[turn]
        wire_seconds = transfer.wire_seconds + (transfer.held_back_seconds if held_back else 0.0)
        seconds = max(wire_seconds, float((self.loads[turn] / free).max(initial=0.0)))
        return 1 / seconds if seconds > 0 else math.inf

    def _speeds(self, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The speed of each rank (1: as measured), and the credit that each node gains per second."""
        part = self.computing / self.ranks_of_node
        left = np.where(self.usable > 0, self.peak, self.full) - used
        speed = np.minimum(self.peak, left / np.maximum(part, _NOTHING))
        return speed[self.node], self.full - used - part * speed
