# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Liveness`: which nodes of a run have been heard of, from counters that they pass on to each other.

Every node raises a counter of its own with each beat, and sends what it knows of all counters to others: to all, up to
`FULL_MESH` nodes, and beyond to the nodes 1, 2, 4, ... places behind it. So each sends and gets log2(N) messages a
beat, and news of a node reach all others within log2(N) beats (dissemination, as in the barrier of Hensgen, Finkel and
Manber, 1988). A node whose counter stands still is silent. Standard library only, and no clock of its own: the caller
says what time it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


#: Up to so many nodes each one sends to all others, so that silence is noticed as soon as can be.
FULL_MESH = 9
#: The counter of a node that has ended in order.
ENDED = 2**32 - 1


@dataclass(frozen=True)
class Change:
    """News of a node.

    Args:
        node: its index.
        is_silent: it is silent now; else it is back.
        seconds: for how long it has not been heard of, or had not.
    """

    node: int
    is_silent: bool
    seconds: float


class Liveness:
    """What one node knows of the others.

    Args:
        node: index of this node.
        count: number of nodes.
        beat_seconds: between two beats.
        notice_seconds: until the silence of a node is noticed by all; one beat more for each doubling of the nodes
            beyond `FULL_MESH`.
        now: the time, of a clock that only goes forward.
    """

    def __init__(self, node: int, count: int, *, beat_seconds: float, notice_seconds: float, now: float) -> None:
        self.node = node
        self.count = count
        self.counters = [0] * count
        #: By silent node, when it was heard of last.
        self.silent: dict[int, float] = {}
        self._beat_seconds = beat_seconds
        # The last beat was sent up to one beat ago, and this node looks once a beat.
        self._allowed = max(beat_seconds, notice_seconds - beat_seconds)
        self._heard_at = [now] * count
        self._looked_at = now

    def receivers(self) -> list[int]:
        """The nodes to which this one sends."""
        if self.count <= FULL_MESH:
            return [node for node in range(self.count) if node != self.node]
        distances = (2**power for power in range(self.count.bit_length()))
        return sorted({(self.node + distance) % self.count for distance in distances if distance < self.count})

    def beat(self) -> list[int]:
        """Raises this node's counter; returns all counters, to be sent."""
        self.counters[self.node] += 1
        return list(self.counters)

    def end(self) -> list[int]:
        """Says that this node ends in order; returns all counters, to be sent."""
        self.counters[self.node] = ENDED
        return list(self.counters)

    def hear(self, counters: Sequence[int], now: float) -> None:
        """Takes in what another node has sent."""
        for node, counter in enumerate(counters):
            if node != self.node and counter > self.counters[node]:
                self.counters[node] = counter
                self._heard_at[node] = now

    def look(self, now: float) -> list[Change]:
        """What has changed since the last look. To be called once a beat."""
        stopped = now - self._looked_at
        if stopped > 2 * self._beat_seconds:
            # This node was frozen itself, or had no processor: what it did not hear meanwhile says nothing of others.
            self._heard_at = [heard + stopped for heard in self._heard_at]
            self.silent = {node: heard + stopped for node, heard in self.silent.items()}
        self._looked_at = now
        changes = []
        for node, counter in enumerate(self.counters):
            heard_at = self._heard_at[node]
            # One that was never heard of may be behind a firewall that lets no datagrams through.
            is_silent = node != self.node and 0 < counter < ENDED and now - heard_at > self._allowed
            if is_silent and node not in self.silent:
                self.silent[node] = heard_at
                changes.append(Change(node, True, now - heard_at))
            elif not is_silent and node in self.silent:
                changes.append(Change(node, False, heard_at - self.silent.pop(node)))
        return changes

    def unheard(self) -> list[int]:
        """The nodes of which nothing was ever heard."""
        return [node for node, counter in enumerate(self.counters) if counter == 0 and node != self.node]

    def longest_silence(self, now: float) -> tuple[int, float] | None:
        """The silent node that has not been heard of for longest, and for how many seconds; None: there is none."""
        if not self.silent:
            return None
        node = min(self.silent, key=lambda each: self.silent[each])
        return node, now - self.silent[node]
