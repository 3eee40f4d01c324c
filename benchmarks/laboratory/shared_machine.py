# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Simulated steps of nodes that are emulated on one machine, each under a CPU quota.

A quota limits CPU seconds per period. A node that waits for less than a period saves quota, and computes faster than
its quota afterwards until the saved credit is used up.

The nodes may together want more than the machine has. Then each of them gets a little less than its quota while all
compute, and all of it while some wait; nodes that compute share the capacity beyond that. Credit that a node cannot
use beside so many others is kept until fewer nodes compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accelerate_lshdp.planning.cost.step_simulation import NOTHING, Segment, SimulatedStep, StepSimulator, Transfer


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors of a node under a CPU quota, relative to the speed that its ranks' curves were measured at.

    Args:
        peak: factor by which a rank is faster while no quota stops it: 1 / 0.3 with a quota of 30 % of a core.
        period_seconds: seconds of the quota's period; 0: there is no quota.
        quota_cores: CPU seconds per second that the quota allows and that the node's ranks can use.
        machine_cores: cores of the machine that the nodes share.
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


def simulate_under_quotas(
    segments: Sequence[Segment],
    transfers: Sequence[Transfer],
    node_of_rank: Sequence[int],
    processors: Sequence[Processors],
) -> SimulatedStep:
    """Simulates one step of many equal ones; as `simulate_step`, but for the processors of each node."""
    simulator = QuotaSimulator(segments, transfers, node_of_rank, processors)
    # Credit at the end of a step is there at the start of the next: the second step is the one in the middle of a run.
    simulated = simulator.simulate()
    return simulator.simulate() if simulator.most_credit.any() else simulated


class QuotaSimulator(StepSimulator):
    """The state of a simulation, with the credit that each node has saved, which is kept from step to step."""

    def __init__(
        self,
        segments: Sequence[Segment],
        transfers: Sequence[Transfer],
        node_of_rank: Sequence[int],
        processors: Sequence[Processors],
    ) -> None:
        super().__init__(segments, transfers, node_of_rank)
        self.quota_speed = np.array([node.quota_speed for node in processors])
        self.quota_cores = np.array([node.quota_cores for node in processors])
        self.crowd_cores = sum(node.crowded_cores for node in processors)
        # By the number of nodes that compute: each node's peak, and the credit that it can use then.
        beside = range(len(processors) + 1)
        self.peaks = np.array([[node.peak_beside(nodes) for node in processors] for nodes in beside])
        self.credits = np.array([[node.credit_seconds(nodes) for node in processors] for nodes in beside])
        self.most_credit = self.credits[0]
        self.credit = np.zeros(len(processors))  # seconds of a node's processors that it has saved
        self.saving = np.zeros(len(processors))  # of them, a second

    def update_nodes(self) -> None:
        nodes = np.count_nonzero(self.computing)
        # All that compute want more than they got together when curves were measured: their measured speed stays.
        is_crowded = self.quota_cores[self.computing > 0].sum() > self.crowd_cores
        self.earned = np.ones(len(self.quota_speed)) if is_crowded else self.quota_speed
        self.peak = np.maximum(self.earned, self.peaks[nodes])
        # What a node cannot use beside so many others is left for later, when there are fewer.
        self.usable = self.credit - (self.most_credit - self.credits[nodes])
        self.usable[self.usable < NOTHING] = 0.0
        self.full = np.where(self.usable > 0, self.peak, self.earned)

    def holds_back(self) -> bool:
        # A node that has saved quota is not stopped, so its messages do not wait for the next period.
        return bool(((self.computing > 0) & (self.usable == 0)).any())

    def until_nodes_change(self, used: np.ndarray) -> Sequence[float]:
        self.saving = self.earned - used
        spending = (self.saving < -NOTHING) & (self.usable > 0)
        return list(self.usable[spending] / -self.saving[spending])

    def pass_time(self, seconds: float) -> None:
        self.credit = np.clip(self.credit + self.saving * seconds, 0.0, self.most_credit)
