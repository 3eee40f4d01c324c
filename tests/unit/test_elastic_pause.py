# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A launcher that pauses its ranks in order stops waiting for them when one is lost with which they train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launcher_network import Network, begun
from simulated_launchers import SimulatedRun

from accelerate_lshdp.cli.elastic_launcher import ElasticLauncher
from accelerate_lshdp.cli.elastic_notices import ElasticNotices
from accelerate_lshdp.runtime.elastic_rank import KEEP, PAUSE
from accelerate_lshdp.runtime.membership.link import View
from accelerate_lshdp.runtime.membership.membership import Membership


@dataclass
class Link:
    """That of the first launcher of a network."""

    network: Network

    def view(self) -> View:
        return View.of(self.network.launchers[0], self.network.now)

    @contextmanager
    def changing(self) -> Iterator[Membership]:
        yield self.network.launchers[0]


@dataclass
class HangingRanks:
    """Ranks in a step that does not end; while they are waited for the first time, machine 2 is lost."""

    network: Network
    words: list[bytes] = field(default_factory=list)
    waits: int = 0
    listen: bool = True

    def tell(self, word: bytes) -> None:
        self.words.append(word)

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        assert self.waits < 5, "it waits on"
        if self.waits == 1:
            self.network.off.add(2)
            self.network.run(4.0)  # it is noticed, and the next generation has begun
        return False

    def kill(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_hang_are_not_waited_for_when_those_of_another_node_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The members stay, so that nothing but what a launcher says of its ranks tells the others."""
    run = SimulatedRun(tmp_path, monkeypatch, 3, seed=seed)
    run.run(6)
    run.hanging = {2}
    run.programs[0].ranks.kill()
    run.run(6)
    assert run.trains_in(0, 1, 2)


def test_a_pause_ends_though_the_loss_was_decided_between_two_looks() -> None:
    network = begun(3, 0)
    before: Any = network.current(0)
    network.launchers[1].lost_ranks = 1  # a change in order: all members stay
    network.run(1.0)
    assert network.together() and network.current(0).number == 2
    ranks = HangingRanks(network)
    notices = ElasticNotices(3, 1, lambda line: None)
    launcher = ElasticLauncher(None, None, Link(network), ranks, notices, training=before)
    launcher._end_ranks(in_order=True)
    assert network.members(0) == ["machine0", "machine1"]
    assert ranks.words == [PAUSE, KEEP] and ranks.waits == 2
