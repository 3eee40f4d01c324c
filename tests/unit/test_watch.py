# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a run says of itself while it trains."""

from __future__ import annotations

import pytest

from accelerate_lshdp import Plan
from accelerate_lshdp.accelerator import watch as module
from accelerate_lshdp.accelerator.step_statistics import StepStatistics
from accelerate_lshdp.accelerator.watch import WATCH_VARIABLE, Watch, carried_bytes, watch_of
from accelerate_lshdp.runtime.topology import Topology


STATISTICS = StepStatistics(0.5, (0.4, 0.3), (0.05, 0.15), (0.02, 0.01), (0.0, 0.001), 0.125, 64.0, 50)


class Told:
    """A watch of two ranks whose clock and network the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: float, predicted: float | None) -> None:
        self.now, self.carried, self.tables = 100.0, (0, 0), []
        monkeypatch.setattr(module, "carried_bytes", lambda: self.carried)
        self.watch = Watch(
            every, ["rank 0", "rank 10"], predicted, lambda: STATISTICS, self.tables.append, lambda: self.now
        )

    def step(self, number: int, seconds: float = 0.5, decision: object | None = None) -> None:
        self.now += seconds
        self.carried = (self.carried[0] + 2_000_000, self.carried[1] + 3_000_000)
        self.watch.stepped(32 * number, (20, 12), decision)


def test_a_table_every_few_seconds_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, every=2.0, predicted=0.48)
    told.step(1, seconds=30.0)  # with what comes before
    for number in range(2, 12):
        told.step(number, decision="re-balance: [16, 16] -> [20, 12]" if number == 3 else None)
    assert [table.splitlines()[0].partition(":")[0] for table in told.tables] == ["step 5", "step 9"]
    first = told.tables[0].splitlines()
    assert first[0] == "step 5: 64 samples/s, 0.5 s a step (predicted: 0.48 s), ranks are idle for 12%"
    assert first[1] == "  rank 0   batch   20  compute 0.4000 s  wait 0.0500 s  optimizer 0.0200 s  data 0.0000 s"
    assert first[2].startswith("  rank 10  batch   12  compute 0.3000 s  wait 0.1500 s")
    assert first[3] == "  this machine has sent 2 MB a step, and received 3 MB"
    assert first[4:] == ["  at step 3, re-balance: [16, 16] -> [20, 12]"]
    assert "at step" not in told.tables[1]
    told.watch.end()
    last = told.tables[2].splitlines()
    assert last[0] == "trained 11 steps: 64 samples/s, 0.5 s a step (predicted: 0.48 s), ranks are idle for 12%"
    assert last[3] == "  this machine has sent 2 MB a step, and received 3 MB"


def test_what_has_not_trained_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, every=2.0, predicted=None)
    told.watch.end()
    told.step(1)
    told.watch.end()
    assert told.tables == []


def test_the_first_rank_has_one_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.from_batch_sizes([2, 1])
    monkeypatch.delenv(WATCH_VARIABLE, raising=False)
    assert watch_of(Topology(0, (1, 1)), plan, lambda: None) is None
    monkeypatch.setenv(WATCH_VARIABLE, "5")
    assert watch_of(Topology(1, (1, 1)), plan, lambda: None) is None
    assert watch_of(Topology(0, (1, 1)), plan, lambda: None)._names == ["rank 0 on node 0", "rank 1 on node 1"]


@pytest.mark.parametrize("text", ["", "often", "0", "-1", "nan", "inf"])
def test_other_values_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(WATCH_VARIABLE, text)
    for rank in range(2):
        with pytest.raises(ValueError, match="LSDP_WATCH, expected seconds"):
            watch_of(Topology(rank, (1, 1)), Plan.from_batch_sizes([2, 1]), lambda: None)


def test_what_interfaces_have_carried(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert min(carried_bytes()) >= 0
    file = tmp_path / "dev"
    carried = {"    lo": (9, 9), "  eth0": (10, 20), "wlan0": (1, 2)}
    rows = [f"{name}: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0" for name, (received, sent) in carried.items()]
    file.write_text("\n".join(["Inter-|   Receive  |  Transmit", " face |bytes packets |bytes packets", *rows, ""]))
    monkeypatch.setattr(module, "_INTERFACES", file)
    assert carried_bytes() == (22, 11)
    monkeypatch.setattr(module, "_INTERFACES", tmp_path / "missing")
    assert carried_bytes() == (0, 0)
