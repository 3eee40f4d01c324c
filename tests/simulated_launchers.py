# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SimulatedRun`: real launchers of an elastic run with simulated ranks, network and time.

Each launcher runs in a thread of its own, one at a time: whenever it waits, the clock goes on for all. Ranks are as
those of a script with a Trainer: after a start they make steps together, leave at the end of one if some launcher asks
for it, save and end upon SIGTERM, hang if a machine is off with whose ranks they train, and end after a last step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launcher_network import STEP, Network

from accelerate_lshdp.cli import elastic_launcher
from accelerate_lshdp.cli.elastic_launcher import ElasticLauncher
from accelerate_lshdp.cli.elastic_notices import ElasticNotices
from accelerate_lshdp.runtime.elastic_rank import ELASTIC_VARIABLE, KEEP, KEPT, PAUSE, NodeFolder
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER
from accelerate_lshdp.runtime.membership.generation import Member
from accelerate_lshdp.runtime.membership.link import View
from accelerate_lshdp.runtime.membership.membership import Membership, Rules
from accelerate_lshdp.runtime.membership.message import Status


SIGTERM = 15


class SimulatedRun(Network):
    """Launchers, each on a machine with one rank.

    Args:
        folder: for what launchers and their ranks have in memory.
        monkeypatch: of the test.
        count: of the machines.
        present: how many of them take part from the beginning; the others can be started later.
        min_nodes: of the run.
        seed: of the network.

    Attributes:
        start_seconds: that ranks take until they train.
        after_step: seconds that follow a step after which ranks leave, as of an evaluation.
        last_save: seconds for which the first rank saves after the last step.
        stop_save: seconds for which it saves upon a signal, the others half as long.
        save_code: with which ranks end then.
        hanging: machines whose ranks do not notice that others have ended.
        has_last_step: whether the next step is the last one.
        codes: of launchers that have ended, by machine.
        saved: the machines whose ranks have saved a step upon a signal, for each such step.
        cut_off: what ranks were ended in though all others were there: "step", "after step" or "last save".
        steps: that the run has made.
        begun: number of each generation that has trained.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        *,
        present: int | None = None,
        min_nodes: int = 1,
        seed: int = 0,
    ) -> None:
        self._folder = folder
        self._present = count if present is None else present
        self.start_seconds, self.after_step, self.last_save = 1.0, 0.0, 0.0
        self.stop_save, self.save_code = 1.0, 0
        self.has_last_step = False
        self.hanging: set[int] = set()
        self.codes: dict[int, int] = {}
        self.saved: list[frozenset[int]] = []
        self.cut_off: list[str] = []
        self.steps = 0
        self.begun: list[int] = []
        self.groups: dict[tuple[str, int], Group] = {}
        self._ends: list[tuple[float, int, int]] = []
        self._threads: dict[int, Turn] = {}
        super().__init__(count, seed, rules=Rules(min_nodes=min_nodes))
        self.off |= set(range(self._present, count))
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(elastic_launcher, "time", clock)
        monkeypatch.setattr(elastic_launcher, "new_member", self._new_member)
        monkeypatch.setattr(elastic_launcher, "free_port", lambda: 1)
        self.programs: dict[int, ElasticLauncher] = {}
        for machine in range(self._present):
            self._begin(machine)

    def start(self, machine: int) -> Membership:
        self.started[machine] += 1
        me = self._new_member((f"10.0.0.{machine}", 29500), 1)
        peers = [(f"10.0.0.{other}", 29500) for other in range(self.count)]
        founders = self._present if machine == 0 else 0
        return Membership(me, "run", peers, founders, f"{self.now:09.2f}", self.rules, self.now)

    def _new_member(self, address: tuple[str, int], ranks: int) -> Member:
        machine = int(address[0].rpartition(".")[2])
        self.started[machine] += 1
        return Member(f"machine{machine}", f"start{self.started[machine]}", address, ranks)

    def note(self, launcher: Membership) -> None:
        """Launchers come back by themselves."""

    def _begin(self, machine: int) -> None:
        memory = NodeFolder(self._folder / f"{machine}.{self.started[machine]}")
        memory.path.mkdir()
        plan = SimpleNamespace(elastic=SimpleNamespace(min_nodes=self.rules.min_nodes), for_ranks=_plan_for_ranks)
        job: Any = SimpleNamespace(ranks=1, plan=plan, environment={}, notice_seconds=self.rules.notice_seconds)
        ranks: Any = Ranks(self, machine, memory)
        link: Any = Link(self, machine)
        notices = ElasticNotices(self._present, self.rules.min_nodes, lambda line: None)
        self.programs[machine] = ElasticLauncher(job, memory, link, ranks, notices)
        self._threads[machine] = Turn(self.programs[machine].run)
        self._threads[machine].wake_at = self.now

    # What happens

    def come(self, *machines: int) -> None:
        """Launchers start on machines that were off, or whose launchers have ended."""
        for machine in machines:
            self.codes.pop(machine, None)
            for group in self.groups.values():
                before = group.ranks.get(machine)
                if before is not None and not before.codes:
                    before.codes.append(-9)  # of which those hear now that hang
            self._ends = [each for each in self._ends if each[1] != machine]
            self.restart(machine)
            self._begin(machine)

    def tell_to_end(self, *machines: int) -> None:
        """Launchers get SIGTERM."""
        for machine in machines:
            if machine not in self.codes:
                self.programs[machine].note_signal(SIGTERM, None)

    def power_off(self, *machines: int) -> None:
        """The others' ranks hear nothing of it, and hang."""
        for machine in machines:
            self.off.add(machine)
            self._threads.pop(machine, None)

    def fail(self, machine: int) -> None:
        """The script has an error of its own there."""
        ranks = self.programs[machine].ranks
        if not ranks.codes:
            ranks.codes.append(1)

    def trains_in(self, *machines: int) -> bool:
        """Whether these machines, and no others, make steps now."""
        before = self.steps
        self.run(0.3)
        made = [group for group in self.groups.values() if group.has_stepped_at >= self.now - 0.3]
        return self.steps > before and [set(group.ranks) for group in made] == [set(machines)]

    def run_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Lets time go on until something holds; whether it does within so many seconds."""
        end = self.now + seconds
        while self.now < end and not holds():
            self.run(STEP / 2)
        return holds()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            super().run(STEP / 2)  # one step
            for group in list(self.groups.values()):
                group.go_on()
            for machine, turn in list(self._threads.items()):
                if machine not in self.frozen and turn.wake_at <= self.now:
                    turn.take()
                    if turn.error is not None:
                        raise turn.error
                    if turn.has_ended:
                        del self._threads[machine]
                        self.codes[machine] = turn.code
                        # Its ranks end with it, and its farewells take half a second.
                        self.programs[machine].ranks.kill()
                        if self.launchers[machine].status is Status.LEAVES:
                            self.launchers[machine].say(Status.LEFT)
                        self._ends.append((self.now + 0.5, machine, self.started[machine]))
            for at, machine, start in list(self._ends):
                if at <= self.now and self.started[machine] == start:
                    self.off.add(machine)

    def _sleep(self, seconds: float) -> None:
        turn = Turn.current()
        turn.wake_at = self.now + seconds
        turn.pass_on()


def _plan_for_ranks(ranks: int, *, as_planned: bool) -> Any:
    return SimpleNamespace(to_dict=dict)


class Turn:
    """A thread that runs only while the caller of `take` waits for it."""

    _of_thread = threading.local()

    def __init__(self, target: Callable[[], int]) -> None:
        self.wake_at = 0.0
        self.code = 0
        self.has_ended = False
        self.error: BaseException | None = None
        self._target = target
        self._may_run, self._has_waited = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    @classmethod
    def current(cls) -> Turn:
        return cls._of_thread.turn

    def take(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._may_run.release()
        self._has_waited.acquire()

    def pass_on(self) -> None:
        self._has_waited.release()
        self._may_run.acquire()

    def _run(self) -> None:
        self._may_run.acquire()
        self._of_thread.turn = self
        try:
            self.code = self._target()
        except BaseException as error:  # the test raises it
            self.error = error
        self.has_ended = True
        self._has_waited.release()


@dataclass
class Link:
    """That of a launcher of a simulated run."""

    run: SimulatedRun
    machine: int

    def view(self) -> View:
        return View.of(self.run.launchers[self.machine], self.run.now)

    @contextmanager
    def changing(self) -> Iterator[Membership]:
        yield self.run.launchers[self.machine]

    def wait(self, seconds: float) -> None:
        self.run._sleep(seconds)


@dataclass
class Group:
    """The ranks of a generation."""

    run: SimulatedRun
    size: int
    ranks: dict[int, Ranks] = field(default_factory=dict)
    leaves_at: float | None = None
    has_stepped_at: float = -1.0

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the generation train."""
        train = [each.is_alive and not each.codes and self.run.now > each.trains_from for each in self.ranks.values()]
        return len(train) == self.size and all(train)

    def go_on(self) -> None:
        now = self.run.now
        living = [each for each in self.ranks.values() if not each.codes]
        for each in living:
            if each.saves_until is not None and now >= each.saves_until and each.is_alive:
                each.codes.append(each.saves_with)
        codes = [code for each in self.ranks.values() for code in each.codes]
        if any(codes):
            for each in living:  # its connections have ended
                if each.saves_until is None and each.is_alive and each.machine not in self.run.hanging:
                    each.codes.append(FOLLOWS_ANOTHER)
            return
        if len(self.ranks) < self.size or not all(each.is_alive for each in self.ranks.values()):
            return  # they wait, or hang
        if self.leaves_at is not None:
            if now >= self.leaves_at and all(each.saves_until is None for each in living):
                for each in living:
                    each.codes.append(KEPT)
            return
        if len(living) < self.size or any(now < each.trains_from or each.saves_until is not None for each in living):
            return
        self.has_stepped_at = now
        self.run.steps += 1
        for each in living:
            each.memory.stepped(each.generation).touch()
        if any(each.has_handled for each in living):
            self.run.saved.append(frozenset(self.ranks))
            for each in living:
                each.saves_until = now + self.run.stop_save * (1.0 if each.rank == 0 else 0.5)
                each.saves_with = self.run.save_code
        elif self.run.has_last_step:
            for each in living:
                each.saves_until = now + (self.run.last_save if each.rank == 0 else 0.0)
        elif any(each.has_to_pause for each in living):
            self.leaves_at = now + self.run.after_step


@dataclass
class Ranks:
    """The rank of a machine, as `NodeRanks`."""

    run: SimulatedRun
    machine: int
    memory: NodeFolder
    codes: list[int] = field(default_factory=list)
    count: int = 0
    generation: int = 0
    rank: int = 0
    trains_from: float = 0.0
    has_to_pause: bool = False
    has_handled: bool = False
    saves_until: float | None = None
    saves_with: int = 0
    group: Group | None = None

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        assert self.codes or not self.count, "ranks are started while others run"
        [environment] = environments
        told = json.loads(environment[ELASTIC_VARIABLE])
        self.memory.clear_ranks()
        key = f"{told['origin']}{environment['MASTER_ADDR']}", told["generation"]
        # A rank object of its own in the group: this one is used again.
        self.__dict__.update(
            count=1,
            codes=[],
            generation=told["generation"],
            has_to_pause=False,
            has_handled=False,
            saves_until=None,
            saves_with=0,
        )
        self.rank = int(environment["RANK"])
        self.trains_from = self.run.now + self.run.start_seconds
        self.run.begun.append(self.generation)
        if self.group is not None:
            self.group.ranks[self.machine] = Ended(list(self.group_codes))
        self.group = self.run.groups.setdefault(key, Group(self.run, int(environment["WORLD_SIZE"])))
        self.group.ranks[self.machine] = self
        self.group_codes = self.codes

    @property
    def is_alive(self) -> bool:
        return self.machine not in self.run.off | self.run.frozen

    @property
    def has_any(self) -> bool:
        return bool(self.count) and not self.codes

    @property
    def listen(self) -> bool:
        return bool(self.count) and self.run.now >= self.trains_from - self.run.start_seconds / 2

    def tell(self, word: bytes) -> None:
        if self.codes or not self.count:
            return
        if word == PAUSE:
            self.has_to_pause = True
        elif word == KEEP and self.listen:
            self._note_what_is_cut_off()
            self.codes.append(KEPT)

    def signal(self, number: int) -> None:
        if self.has_any and self.memory.stepped(self.generation).exists():
            self.has_handled = True
        elif self.has_any:
            self.codes.append(-number)

    def wait(self, seconds: float) -> bool:
        end = self.run.now + seconds
        while self.has_any and self.run.now < end:
            self.run._sleep(STEP)
        return not self.has_any

    def kill(self) -> None:
        if self.has_any:
            self._note_what_is_cut_off()
            self.codes.append(-9)

    def _note_what_is_cut_off(self) -> None:
        if self.saves_until is not None:
            self.run.cut_off.append("last save")
        elif self.group is not None and self.group.leaves_at is not None:
            self.run.cut_off.append("after step")
        elif self.group is not None and self.group.is_whole:
            self.run.cut_off.append("step")


@dataclass
class Ended:
    """What is left of a rank whose machine has begun another one."""

    codes: list[int]
    is_alive: bool = True
    trains_from: float = 0.0
