# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Launchers of an elastic run that are told to end, or whose training ends, with simulated ranks, network and time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from simulated_launchers import SIGTERM, SimulatedRun


LEFT = 128 + SIGTERM
SEEDS = int(os.environ.get("LAUNCHER_SEEDS", "40"))


class Begin:
    """Makes runs that train."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._arguments = (folder, monkeypatch)

    def __call__(self, count: int, *, present: int | None = None, min_nodes: int = 1, seed: int = 0) -> SimulatedRun:
        run = SimulatedRun(*self._arguments, count, present=present, min_nodes=min_nodes, seed=seed)
        run.run(6)
        assert run.trains_in(*range(count if present is None else present))
        return run


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    return Begin(tmp_path, monkeypatch)


def test_one_leaves_and_the_others_go_on(begin: Begin) -> None:
    run = begin(3)
    run.tell_to_end(2)
    assert run.run_until(lambda: run.codes == {2: LEFT}, 6)
    run.run(3)
    assert run.trains_in(0, 1)


@pytest.mark.parametrize("leaver", range(3))
def test_what_follows_a_step_ends_before_a_node_leaves(begin: Begin, leaver: int) -> None:
    run = begin(3)
    run.after_step = 20.0
    run.tell_to_end(leaver)
    run.run(30)
    assert run.codes == {leaver: LEFT} and run.cut_off == []
    assert run.trains_in(*({0, 1, 2} - {leaver}))


@pytest.mark.parametrize("after", [0.5, 2.6, 5.0])
def test_one_that_leaves_and_is_switched_off_is_not_waited_for(begin: Begin, after: float) -> None:
    run = begin(3)
    run.after_step = 600.0
    run.tell_to_end(2)
    run.run(after)
    run.power_off(2)
    run.run(8)
    run.after_step = 0.0
    assert run.trains_in(0, 1)


@pytest.mark.parametrize("apart", [0.0, 0.5, 1.4, 1.9])
@pytest.mark.parametrize("min_nodes", [1, 3])
def test_all_that_are_told_to_end_within_two_seconds_save_one_step(begin: Begin, apart: float, min_nodes: int) -> None:
    run = begin(3, min_nodes=min_nodes)
    for machine in range(3):
        run.tell_to_end(machine)
        run.run(apart)
    assert run.run_until(lambda: len(run.codes) == 3, 10)
    assert run.codes == {0: 0, 1: 0, 2: 0} and run.saved == [frozenset({0, 1, 2})]


@pytest.mark.parametrize("when", [0.05, 1.5, 1.8, 2.0, 2.5, 3.5, 4.2, 5.0])
def test_all_that_are_told_to_end_after_a_loss_save_one_step(begin: Begin, when: float) -> None:
    run = begin(3)
    run.start_seconds = 2.0
    run.power_off(1)
    run.run(when)
    run.tell_to_end(0, 2)
    assert run.run_until(lambda: len(run.codes) == 2, 60)
    assert run.codes == {0: 0, 2: 0} and run.saved == [frozenset({0, 2})]


@pytest.mark.parametrize("when", [0.0, 0.2, 0.5, 1.0, 1.5, 2.5])
def test_all_that_are_told_to_end_save_though_one_of_them_is_lost(begin: Begin, when: float) -> None:
    run = begin(3)
    run.stop_save = 5.0
    run.tell_to_end(2)
    run.run(0.3)
    run.power_off(2)
    run.run(when)
    run.tell_to_end(0, 1)
    assert run.run_until(lambda: len(run.codes) == 2, 20)
    assert run.codes == {0: 0, 1: 0} and run.saved == [frozenset({0, 1})]


def test_a_failure_of_saving_is_told(begin: Begin) -> None:
    run = begin(2)
    run.save_code = 1
    run.tell_to_end(0, 1)
    run.run(10)
    assert run.codes == {0: 1, 1: 1}


def test_all_that_are_told_to_end_save_however_long_ranks_start(begin: Begin) -> None:
    run = begin(3)
    run.start_seconds = 60.0
    run.power_off(1)
    run.run(6)
    run.tell_to_end(0, 2)
    run.run(90)
    assert run.codes == {0: 0, 2: 0} and run.saved == [frozenset({0, 2})]


@pytest.mark.parametrize("seed", range(4))
def test_all_that_are_told_to_end_as_one_is_let_in_save_one_step(begin: Begin, seed: int) -> None:
    run = begin(3, present=2, seed=seed)
    run.after_step = 40.0
    run.come(2)
    assert run.run_until(lambda: run.current(0).number == 2, 5)
    run.tell_to_end(0, 1, 2)
    run.run(100)
    assert len(run.saved) == 1 and {0, 1} <= run.saved[0] and run.cut_off == []
    assert run.codes == {0: 0, 1: 0, 2: 0 if 2 in run.saved[0] else LEFT}


def test_those_that_are_too_few_to_save_do_not_wait(begin: Begin) -> None:
    run = begin(3, min_nodes=3)
    run.tell_to_end(0)
    assert run.run_until(lambda: run.codes == {0: LEFT}, 10)
    run.run(5)
    run.tell_to_end(1, 2)
    assert run.run_until(lambda: len(run.codes) == 3, 8)
    assert run.saved == []


@pytest.mark.parametrize("when", [0.2, 1.0, 1.3, 2.0, 3.0])
def test_all_that_are_told_to_end_while_one_joins_save_one_step(begin: Begin, when: float) -> None:
    run = begin(3, present=2)
    run.start_seconds, run.after_step = 2.0, 1.0
    run.come(2)
    run.run(when)
    run.tell_to_end(0, 1, 2)
    assert run.run_until(lambda: len(run.codes) == 3, 60)
    assert len(run.saved) == 1 and {0, 1} <= run.saved[0]
    assert run.codes == {0: 0, 1: 0, 2: 0 if 2 in run.saved[0] else LEFT}


def test_nobody_is_let_in_while_all_end(begin: Begin) -> None:
    run = begin(3, present=2)
    run.come(2)
    run.run(0.9)
    run.tell_to_end(0, 1)
    run.run_until(lambda: {0, 1} <= run.codes.keys(), 10)
    assert run.codes == {0: 0, 1: 0} and run.saved == [frozenset({0, 1})]


@pytest.mark.parametrize("last_save", [0.3, 5.0, 400.0])
@pytest.mark.parametrize("after", [0.1, 0.2, 0.4, 2.6])
def test_a_signal_at_the_end_of_a_training_changes_nothing(begin: Begin, last_save: float, after: float) -> None:
    run = begin(2)
    run.has_last_step, run.last_save = True, last_save
    run.run(after)
    run.tell_to_end(0, 1)
    assert run.run_until(lambda: len(run.codes) == 2, last_save + 2)
    assert run.codes == {0: 0, 1: 0} and run.cut_off == []


@pytest.mark.parametrize("before", [0.0, 0.5, 0.9, 1.0, 1.1, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("goes", [False, True])
@pytest.mark.parametrize("last_save", [5.0, 400.0])
def test_what_is_saved_at_the_end_is_saved_though_another_one_joins(
    begin: Begin, before: float, goes: bool, last_save: float
) -> None:
    run = begin(3, present=2)
    run.come(2)
    run.run(before)
    run.has_last_step, run.last_save = True, last_save
    run.run(1.5)
    if goes and 2 not in run.codes:
        run.power_off(2)
    run.run(last_save + 10)
    assert run.cut_off == []
    assert run.codes in ({0: 0, 1: 0, 2: 0}, {0: 0, 1: 0} if goes else None)


@pytest.mark.parametrize("leaver", [0, 1])
def test_one_that_leaves_where_too_few_would_be_left_ends(begin: Begin, leaver: int) -> None:
    run = begin(3, present=2, min_nodes=2)
    run.tell_to_end(leaver)
    assert run.run_until(lambda: run.codes == {leaver: LEFT}, 8)
    run.run(10)
    assert run.codes == {leaver: LEFT}  # the other one waits
    run.come(2)
    run.run(10)
    assert run.trains_in(1 - leaver, 2)


def test_one_that_leaves_where_others_may_go_on_without_it_ends(begin: Begin) -> None:
    run = begin(2)
    run.power_off(0)
    run.run(5)
    run.tell_to_end(1)
    assert run.run_until(lambda: run.codes == {1: LEFT}, 8)


@pytest.mark.parametrize("when", [0.5, 3.0])
def test_one_whose_script_fails_while_it_leaves_ends_the_run(begin: Begin, when: float) -> None:
    run = begin(3)
    run.after_step = 20.0
    run.tell_to_end(1)
    run.run(when)
    run.fail(1)
    run.run(5)
    assert run.codes[1] == 1 and (run.codes == {0: 1, 1: 1, 2: 1} or when > 2)


@pytest.mark.parametrize("machine", range(3))
def test_a_failure_while_ranks_pause_ends_the_run(begin: Begin, machine: int) -> None:
    run = begin(4, present=3)
    run.after_step = 20.0
    run.come(3)
    assert run.run_until(lambda: any(group.leaves_at for group in run.groups.values()), 10)
    run.run(2)
    run.fail(machine)
    assert run.run_until(lambda: len(run.codes) == 4, 10)
    assert set(run.codes.values()) == {1}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_launchers_end_or_train(begin: Begin, seed: int) -> None:
    run = begin(4, present=3, seed=seed)
    draw = run.draw
    run.start_seconds, run.after_step = draw.uniform(0.2, 2), draw.choice([0.0, 0.0, 3.0])
    told: set[int] = set()
    for _ in range(6):
        event = draw.choice(["leave", "off", "come", "freeze", "thaw", "kill", "wait"])
        machine = draw.randrange(4)
        here = machine in run.programs and machine not in run.off and machine not in run.codes
        if event == "leave" and here and machine not in run.frozen | told:
            told |= {machine}
            run.tell_to_end(machine)
        elif event == "off" and here:
            run.power_off(machine)
        elif event == "come" and machine in run.off:
            told -= {machine}
            run.frozen.discard(machine)
            run.come(machine)
        elif event == "freeze" and here:
            run.frozen.add(machine)
        elif event == "thaw":
            run.frozen.clear()
        elif event == "kill" and here and run.programs[machine].ranks.has_any:
            run.programs[machine].ranks.kill()
        run.run(draw.uniform(0.1, 4.0))
    run.frozen.clear()
    run.after_step, run.cut_off = 0.0, []
    for machine in set(range(4)) & (run.off | run.codes.keys()):
        run.run(1)
        run.come(machine)
        told -= {machine}
    run.run(40)
    assert told <= run.codes.keys()
    assert set(run.codes.values()) <= {0, LEFT}
    left = set(range(4)) - run.codes.keys()
    is_over = 0 in run.codes.values()  # all that trained were told to end
    assert is_over or not left or run.trains_in(*left)
