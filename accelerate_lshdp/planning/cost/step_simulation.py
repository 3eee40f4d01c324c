# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Event-driven simulation of one training step: ranks that compute, transfers between nodes, and their processors.

A step is a list of segments of computing, the same for all ranks, and a list of transfers, one of which runs at a
time in each of their lanes: process groups do not wait for each other. Transfers of several lanes share the wire, and
the processors, evenly. A transfer begins when all ranks have finished a segment; a segment may need a transfer.
Between two events all speeds are constant, so the simulation goes from event to event (a fluid model).

On machines without accelerators a transfer uses the processors that compute, for system calls, copies and sums. It
gets at most half of the processors of a node that computes (threads share them fairly), and computing goes on with the
rest. So a transfer is as fast as the slowest of the wire and every node's processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


#: The part of a node's processors that a transfer gets beside computing: the scheduler gives two busy threads half
#: each.
_FAIR_SHARE = 0.5
#: Below it, seconds and parts of a node are a remainder of rounding.
NOTHING = 1e-9


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
        lane: transfers of one lane go one after the other.
    """

    wire_seconds: float
    load_seconds: tuple[float, ...]
    after: int
    held_back_seconds: float = 0.0
    lane: int = 0


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
    segments: Sequence[Segment], transfers: Sequence[Transfer], node_of_rank: Sequence[int]
) -> SimulatedStep:
    """Simulates one step.

    Args:
        segments: the computing of every rank, in order.
        transfers: the exchanges, in order, those of a lane one after the other.
        node_of_rank: the node of each rank, from 0; ranks of one node share its processors.

    Raises:
        ValueError: a segment and a transfer wait for each other.
    """
    return StepSimulator(segments, transfers, node_of_rank).simulate()


class StepSimulator:
    """The state of a simulation; speeds are relative to that at which the ranks' seconds were measured.

    Attributes have one entry a node, or one a rank where a comment says so. A subclass may say that nodes are faster
    at times: `full` is the speed of all processors of a node, `peak` that of a rank which others leave them to.
    """

    def __init__(
        self, segments: Sequence[Segment], transfers: Sequence[Transfer], node_of_rank: Sequence[int]
    ) -> None:
        self.node = np.asarray(node_of_rank, dtype=int)  # of each rank
        self.ranks_of_node = np.bincount(self.node)
        # Seconds, shape [segments, ranks]; `needs` ends with an entry for ranks that have no segment left.
        self.work = np.array([segment.seconds for segment in segments], dtype=float).reshape(-1, len(self.node))
        self.needs = np.array([*(-1 if segment.needs is None else segment.needs for segment in segments), -1])
        self.transfers = transfers
        self.loads = [np.asarray(transfer.load_seconds, dtype=float) for transfer in transfers]
        self.full = self.peak = np.ones(len(self.ranks_of_node))
        self.computing = np.zeros(len(self.ranks_of_node))  # number of ranks

    def simulate(self) -> SimulatedStep:
        """Simulates one step."""
        left_of_segment = self.work.copy()
        ranks, last = np.arange(len(self.node)), len(self.work)
        place = np.zeros(len(ranks), dtype=int)  # the segment that each rank is in
        # Of each lane the transfers that have not had their turn yet, by their indices, the next one last.
        lanes = self._lanes()
        left_of_transfer = np.ones(len(self.transfers))
        is_over = np.zeros(len(self.transfers) + 1, dtype=bool)
        is_over[-1] = True  # the index -1 stands for none
        now, busy = 0.0, np.zeros(len(ranks))
        while any(lanes) or place.min() < last:
            # A rank computes if the transfer that its segment needs has had its turn.
            computes = (place < last) & is_over[self.needs[place]]
            moving = [lane[-1] for lane in lanes if lane and place.min() > self.transfers[lane[-1]].after]
            if not moving and not computes.any():
                raise ValueError("found segments and transfers that wait for each other: no order can end them")
            self.computing = np.bincount(self.node[computes], minlength=len(self.ranks_of_node))
            self.update_nodes()
            rates = [self._transfer_rate(turn, len(moving)) for turn in moving]
            # A transfer without bytes ends at once, and would divide by zero below.
            at_once = [turn for turn, rate in zip(moving, rates, strict=True) if math.isinf(rate)]
            if at_once:
                self._end(at_once, lanes, is_over)
                continue
            used = sum((rate * self.loads[turn] for turn, rate in zip(moving, rates, strict=True)), 0.0 * self.full)
            part = self.computing / self.ranks_of_node
            speed = np.minimum(self.peak, (self.full - used) / np.maximum(part, NOTHING))
            active = ranks[computes]
            speeds = speed[self.node[active]]
            times = left_of_segment[place[active], active] / speeds
            until_moved = [left_of_transfer[turn] / rate for turn, rate in zip(moving, rates, strict=True)]
            # The next event: a segment ends, a transfer ends, or a node changes its speed.
            elapsed = min([*times, *until_moved, *self.until_nodes_change(used + part * speed)])
            now += elapsed
            busy[active] += elapsed
            self.pass_time(elapsed)
            left_of_segment[place[active], active] -= elapsed * speeds
            # What is next ends exactly, whatever rounding left of it: otherwise time might stand still.
            place[active[times <= elapsed]] += 1
            ended = []
            for turn, rate, until in zip(moving, rates, until_moved, strict=True):
                left_of_transfer[turn] -= rate * elapsed
                if until <= elapsed or left_of_transfer[turn] <= 0:
                    ended.append(turn)
            self._end(ended, lanes, is_over)
        return SimulatedStep(float(now), tuple(busy.tolist()))

    def _lanes(self) -> list[list[int]]:
        """The indices of the transfers of each lane, the first one last."""
        lanes: dict[int, list[int]] = {}
        for turn in reversed(range(len(self.transfers))):
            lanes.setdefault(self.transfers[turn].lane, []).append(turn)
        return list(lanes.values())

    @staticmethod
    def _end(turns: Sequence[int], lanes: Sequence[list[int]], is_over: np.ndarray) -> None:
        """Notes that transfers, each the next one of its lane, have had their turn."""
        for lane in lanes:
            if lane and lane[-1] in turns:
                is_over[lane.pop()] = True

    def update_nodes(self) -> None:  # noqa: B027 - nodes of their own do not change
        """Updates the nodes' speeds for the ranks that compute now."""

    def until_nodes_change(self, used: np.ndarray) -> Sequence[float]:
        """Seconds until nodes change their speed.

        Args:
            used: of each node's processors, by computing and by the transfer.
        """
        return ()

    def pass_time(self, seconds: float) -> None:  # noqa: B027 - as above
        """Takes note that so many seconds have passed since `until_nodes_change`."""

    def holds_back(self) -> bool:
        """Whether a node delays messages, as a rank of it computes."""
        return bool((self.computing > 0).any())

    def _transfer_rate(self, turn: int, moving: int) -> float:
        """The part of transfer `turn` that is done in one second; infinite if it takes no time.

        Args:
            turn: index of the transfer.
            moving: number of transfers, this one included, that share wire and processors.
        """
        free = np.where(self.computing > 0, _FAIR_SHARE, 1.0) * self.full
        transfer = self.transfers[turn]
        wire_seconds = transfer.wire_seconds + (transfer.held_back_seconds if self.holds_back() else 0.0)
        seconds = moving * max(wire_seconds, float((self.loads[turn] / free).max(initial=0.0)))
        return 1 / seconds if seconds > 0 else math.inf
