# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`ElasticNotices`: what the launcher of an elastic run says of other nodes, and of what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from accelerate_lshdp.runtime.membership.generation import Member
from accelerate_lshdp.runtime.membership.link import View


#: Seconds between two lines of a launcher that waits.
_WAIT_SECONDS = 10.0


@dataclass
class ElasticNotices:
    """Says what has changed since it was told last.

    Args:
        nodes: of the command, with which the run begins.
        min_nodes: fewer do not train.
        say: takes a line.
    """

    nodes: int
    min_nodes: int
    say: Callable[[str], None]
    _silent: set[str] = field(default_factory=set)
    _is_waiting: bool = False
    _left_out: set[Member] = field(default_factory=set)
    _waits_told_at: float = field(default_factory=time.monotonic)

    def tell(self, view: View, *, trains: bool) -> None:
        """Says what is new in a view.

        Args:
            view: of now.
            trains: whether this launcher is a member, or was one until the newest generation.
        """
        self._tell_of_waiting(view, trains)
        self._tell_of_nodes(view)
        members, away = len(view.generation.members), len(self._silent)
        is_short = not view.has_quorum or members - away < self.min_nodes
        waits = bool(view.generation.number) and view.node is not None and away > 0 and is_short
        if waits and not self._is_waiting:
            why = "others may train without them" if not view.has_quorum else f"at least {self.min_nodes} are to train"
            self.say(
                f"found {members - away} of {members} nodes, which are too few to go on: {why}. They keep their state"
                f" and wait for the rest (elastic.{'min_nodes' if view.has_quorum else 'on_partition'})"
            )
        self._is_waiting = waits

    def _tell_of_waiting(self, view: View, trains: bool) -> None:
        now = time.monotonic()
        if view.node is not None or now <= self._waits_told_at + _WAIT_SECONDS:
            return
        self._waits_told_at = now
        if not view.generation.number:
            others = f"; {', '.join(view.foreign)} with another script, other arguments or another plan"
            self.say(
                f"the run has not begun: {len(view.there) + 1} of {self.nodes} nodes are there"
                + (others if view.foreign else "")
            )
        elif not trains:
            deaf = ", ".join(member.name for member in view.deaf)
            why = f"; {deaf} hear nothing of it: let UDP through to them" if deaf else ""
            self.say(f"waits to be let in by the {len(view.generation.members)} nodes that train{why}")

    def _tell_of_nodes(self, view: View) -> None:
        members = {member.name for member in view.generation.members}
        silent = {member.name: seconds for member, seconds in view.silent.items()}
        deaf = set() if view.node is None else {member.name for member in view.deaf}
        lost, lost_deaf = self._newly_left_out(view)
        for name, seconds in {**lost, **silent}.items():
            if name not in self._silent:
                self.say(f"nothing is heard of {name} for {seconds:.1f} s: it is off, frozen, or its network is down")
        for name in (deaf | lost_deaf) - self._silent:
            self.say(
                f"{name} does not hear this node, which hears it: a firewall or a route lets one direction through"
            )
        for name in (self._silent - silent.keys() - deaf) & members:
            self.say(f"{name} is back")
        self._silent = set(silent) | deaf

    def _newly_left_out(self, view: View) -> tuple[dict[str, float], set[str]]:
        """Members that were silent, and ones that did not hear this node, until a generation began without them.

        A quorum decides within milliseconds of when the first launcher has noticed, so that nobody may have looked in
        between.
        """
        out = {*view.left_silent, *view.left_deaf} - self._left_out
        self._left_out |= out
        if view.node is None:
            return {}, set()
        # One that has come back at once is there; one that has said that it leaves is missed by nobody.
        there = {member.name for member in view.generation.members}
        out = {member for member in out if member.name not in there and member.identity not in view.leaving}
        silent = {member.name: view.left_silent[member] for member in out if member in view.left_silent}
        return silent, {member.name for member in out if member in view.left_deaf}
