# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SimulatedRun`: real launchers of an elastic run with simulated ranks, network and time.

Each launcher runs in a thread of its own, one at a time: whenever it waits, the clock goes on for all. What ranks do
is in `simulated_ranks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launcher_network import STEP, Network
from simulated_ranks import Group, Ranks

from accelerate_lshdp.cli import elastic_launcher
from accelerate_lshdp.cli.elastic_launcher import ElasticLauncher
from accelerate_lshdp.cli.elastic_notices import ElasticNotices
from accelerate_lshdp.runtime.elastic_rank import NodeFolder
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
