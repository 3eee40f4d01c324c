# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The gate in front of the steps of a node's ranks: all of them make a step, or none does."""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only launchers on Linux end ranks between two steps")


def gates(folder: Path, ranks: int, timeout_seconds: float = 20.0) -> list:
    from accelerate_lshdp.runtime.step_gate import StepGate

    return [StepGate(folder / "gate", rank, ranks, timeout_seconds) for rank in range(ranks)]


def test_nobody_is_let_through_before_all_have_come(tmp_path: Path) -> None:
    first, second = gates(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.let_through)
        time.sleep(0.05)
        assert not waiting.done()
        assert second.let_through()
        assert waiting.result(5)
    assert (first.arrived, second.arrived, second.close()) == (1, 1, 1)


def test_who_waits_at_a_gate_that_is_closed_is_not_let_through(tmp_path: Path) -> None:
    first, second = gates(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.let_through)
        while not first.arrived:
            time.sleep(0.001)
        assert second.close() == 0
        assert not waiting.result(5)
    assert not second.let_through()
    assert first.close() == 0


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    first, _ = gates(tmp_path, 2, 0.1)
    with pytest.raises(RuntimeError, match="waited 0.1 s for the other ranks of this node"):
        first.let_through()


@pytest.mark.parametrize("seed", range(20))
def test_all_make_the_same_steps_whenever_it_is_closed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randrange(1, 5)
    made = [0] * ranks
    pauses = [[draw.choice((0, 0, 1e-4)) for _ in range(100_000)] for _ in range(ranks)]
    mine = gates(tmp_path, ranks)

    def train(rank: int) -> None:
        while mine[rank].let_through():
            time.sleep(pauses[rank][made[rank]])
            made[rank] += 1

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    time.sleep(draw.uniform(0.005, 0.05))
    # By another thread of a rank, as the one that hears its launcher is, and by another rank as well.
    told = {mine[draw.randrange(ranks)].close(), mine[draw.randrange(ranks)].close()}
    for thread in threads:
        thread.join(10)
    assert told == {made[0]} and len(set(made)) == 1 and made[0] > 0
