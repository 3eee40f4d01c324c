# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The ranks of a simulated elastic run, as those of a script with a Trainer.

After a start they make steps together, leave at the end of one if some launcher asks for it, save and end upon
SIGTERM, hang if a machine is off with whose ranks they train, and end after a last step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launcher_network import STEP

from accelerate_lshdp.runtime.elastic_rank import ELASTIC_VARIABLE, KEEP, KEPT, PAUSE, NodeFolder
from accelerate_lshdp.runtime.failures import FOLLOWS_ANOTHER


if TYPE_CHECKING:
    from simulated_launchers import SimulatedRun


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
        if self.group is not None:
            # This object is the next rank from now on; the group of the one before keeps how that one has ended.
            self.group.ranks[self.machine] = Ended(self.codes)
        self.count, self.codes = 1, []
        self.generation, self.rank = told["generation"], int(environment["RANK"])
        self.has_to_pause = self.has_handled = False
        self.saves_until, self.saves_with = None, 0
        self.trains_from = self.run.now + self.run.start_seconds
        self.run.begun.append(self.generation)
        self.group = self.run.groups.setdefault(key, Group(self.run, int(environment["WORLD_SIZE"])))
        self.group.ranks[self.machine] = self

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
