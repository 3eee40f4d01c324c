# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Network`: launchers of an elastic run on a simulated network that loses, delays and splits, with virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

from accelerate_lshdp.runtime.membership.generation import Generation, Member
from accelerate_lshdp.runtime.membership.membership import Membership, Rules
from accelerate_lshdp.runtime.membership.message import Message, Status


#: Seconds between two looks of a launcher at what it knows.
STEP = 0.05


class Network:
    """Launchers on machines of their own, and what happens to them."""

    def __init__(self, count: int, seed: int, *, loss: float = 0.0, rules: Rules | None = None) -> None:
        self.draw = random.Random(seed)
        self.loss = loss
        self.rules = rules or Rules()
        self.now = 100.0
        self.count = count
        self.started = [0] * count
        self.frozen: set[int] = set()
        self.off: set[int] = set()
        #: Machines that nothing arrives at, though what they send does.
        self.deaf: set[int] = set()
        self.cuts: set[frozenset[int]] = set()
        self._queue: list[tuple[float, int, int, Message]] = []
        self._sent = 0
        self._taken: dict[tuple[str, int, str], Generation] = {}
        #: Generations with one number that two launchers have had.
        self.contradictions: list[tuple[Generation, Generation]] = []
        self.launchers = [self.start(machine) for machine in range(count)]

    def start(self, machine: int) -> Membership:
        self.started[machine] += 1
        me = Member(f"machine{machine}", f"start{self.started[machine]}", (f"10.0.0.{machine}", 29500))
        peers = [(f"10.0.0.{other}", 29500) for other in range(self.count)]
        founders = self.count if machine == 0 else 0
        return Membership(me, "run", peers, founders, f"{self.now:09.2f}", self.rules, self.now)

    def restart(self, *machines: int) -> None:
        """Launchers that have forgotten all start on machines that were off."""
        for machine in machines:
            self.off.discard(machine)
            self.launchers[machine] = self.start(machine)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            while self._queue and self._queue[0][0] <= self.now:
                _, _, machine, message = heapq.heappop(self._queue)
                if machine not in self.frozen | self.off:
                    self.launchers[machine].hear(message, self.now)
            for machine, launcher in enumerate(self.launchers):
                if machine in self.frozen | self.off:
                    continue
                for (address, _), message in launcher.tick(self.now):
                    self.send(machine, int(address.rpartition(".")[2]), message)
                self.note(launcher)

    def send(self, sender: int, receiver: int, message: Message) -> None:
        if receiver in self.deaf or frozenset((sender, receiver)) in self.cuts or self.draw.random() < self.loss:
            return
        for _ in range(2 if self.draw.random() < self.loss else 1):  # datagrams may also come twice, and out of order
            self._sent += 1
            delay = self.draw.uniform(0.0, 0.05)
            heapq.heappush(self._queue, (self.now + delay, self._sent, receiver, message))

    def note(self, launcher: Membership) -> None:
        generation = launcher.generation
        taken = self._taken.setdefault(generation.order, generation)
        if taken.identities != generation.identities:
            self.contradictions.append((taken, generation))
        # A launcher that was left out ends its ranks, and comes back.
        if generation.number and launcher.node is None and launcher.status is Status.RUNS:
            machine = self.launchers.index(launcher)
            self.started[machine] += 1
            launcher.start_anew(replace(launcher.me, incarnation=f"start{self.started[machine]}"))

    def split(self, *parts: set[int]) -> None:
        part_of = {machine: number for number, part in enumerate(parts) for machine in part}
        self.cuts = {
            frozenset((one, other))
            for one in range(self.count)
            for other in range(one)
            if part_of.get(one) != part_of.get(other)
        }

    def split_at_once(self, *parts: set[int]) -> None:
        """Loses the messages that are on their way from one part to another, too."""
        senders = {launcher.me.name: machine for machine, launcher in enumerate(self.launchers)}
        self.split(*parts)
        self._queue = [
            each for each in self._queue if frozenset((senders[each[3].sender.name], each[2])) not in self.cuts
        ]
        heapq.heapify(self._queue)

    def trains(self, part: set[int]) -> bool:
        """Whether some of these machines are members of one generation, and enough to decide on the next one."""
        inside = [self.launchers[machine] for machine in part if self.launchers[machine].node is not None]
        newest = max((launcher.generation for launcher in inside), key=lambda each: each.order, default=None)
        members = {launcher.me.identity for launcher in inside if launcher.generation == newest}
        return newest is not None and newest.is_quorum(members)

    def current(self, machine: int) -> Generation:
        return self.launchers[machine].generation

    def members(self, machine: int) -> list[str]:
        return [member.name for member in self.current(machine).members]

    def together(self) -> bool:
        """Whether all launchers that run are in one generation, and nobody else."""
        here = [machine for machine in range(self.count) if machine not in self.off | self.frozen]
        names = sorted(f"machine{machine}" for machine in here)
        generations = {self.current(machine) for machine in here}
        in_it = all(self.launchers[machine].node is not None for machine in here)
        return len(generations) == 1 and in_it and sorted(self.members(here[0])) == names


def begun(count: int, seed: int, **keywords: object) -> Network:
    network = Network(count, seed, **keywords)
    network.run(3)
    assert network.together() and network.current(0).number == 1
    assert network.members(0) == [f"machine{machine}" for machine in range(count)]
    return network
