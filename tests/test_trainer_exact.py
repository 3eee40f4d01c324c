# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 1 for users' scripts: under the shim, and with the mixin or the callback, they give one process's result.

Compared are the parameters, and what the script logs: losses, gradient norms, learning rates, epochs, the total batch
size, the number of steps, samples and tokens. The default suite runs a pairwise selection (every pair of values of two
factors occurs); ``-m slow`` runs all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from trainer_cases import (
    LOOP,
    SHIM,
    TOTAL,
    TRAINER_SCRIPTS,
    WAYS,
    Outcome,
    Run,
    compare,
    edited_script,
    outcome_of,
    start,
    start_alone,
)
from workers import WorkerPool, WorkerPools

from accelerate_lshdp import Plan


#: The ranks of each node.
NODES = ((1, 1), (2,), (2, 2), (1, 2))
#: Batch sizes by number of ranks, which all make up `TOTAL`; or (micro-batch size, accumulation steps).
UNEQUAL = {2: (7, 5), 3: (6, 1, 5), 4: (5, 1, 4, 2)}
ACCUMULATED = {2: ((4, 2), (2, 2)), 3: ((3, 2), (1, 2), (2, 2)), 4: ((2, 2), (1, 2), (1, 2), (2, 2))}
#: Gradient accumulation: the plan's sizes, and the number of global batches in the script's own accumulation.
ACCUMULATIONS = {
    "none": (UNEQUAL, 1),
    "script": (UNEQUAL, 2),
    "plan": (ACCUMULATED, 1),
    "both": (ACCUMULATED, 2),
}
STRATEGIES = ("lsdp", "ddp", "fsdp")
#: What the user's script asks for on every rank, in place of which the plan's sizes come.
SCRIPTS_BATCH_SIZE = 4
#: Of a rank's environment what must not reach the oracle, a plain `python script.py`.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")

Oracle = Callable[..., Outcome]


class Cell(NamedTuple):
    """One cell of the matrix."""

    script: str
    way: str
    nodes: tuple[int, ...]
    accumulation: str
    strategy: str

    def __str__(self) -> str:
        nodes = "+".join(map(str, self.nodes))
        return f"{self.script}_{self.way}_n{nodes}_{self.accumulation}_{self.strategy}"

    @property
    def plan(self) -> Plan:
        sizes = ACCUMULATIONS[self.accumulation][0][sum(self.nodes)]
        return Plan.from_batch_sizes(sizes, strategy=self.strategy)


def everything() -> list[Cell]:
    """The plain loop has no Trainer, so only the shim."""
    ways = [*itertools.product(TRAINER_SCRIPTS, WAYS), (LOOP, SHIM)]
    return [Cell(*way, *rest) for way, *rest in itertools.product(ways, NODES, ACCUMULATIONS, STRATEGIES)]


def pairwise() -> Iterator[Cell]:
    """A small set of cells in which every pair of values of any two factors occurs (greedy, fixed seed)."""
    cells = everything()
    wanted = {pair for cell in cells for pair in pairs_of(cell)}
    random.Random(0).shuffle(cells)
    while wanted:
        best = max(cells, key=lambda cell: len(wanted & pairs_of(cell)))
        wanted -= pairs_of(best)
        yield best


def pairs_of(cell: Cell) -> set[tuple]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(cell), 2)}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """`oracle(script, accumulation)`: what the script gives in one process that never imports this package."""
    pool = WorkerPool(1)
    known: dict[tuple[str, int], Outcome] = {}

    def outcome(script: str, accumulation: int) -> Outcome:
        if (script, accumulation) not in known:
            run = Run(script, str(make_folder(tmp_path_factory.mktemp("oracle"), (1,))), TOTAL, accumulation)
            pool.run(start_alone, run, env=dict.fromkeys(LAUNCHED))
            known[script, accumulation] = outcome_of(run)
        return known[script, accumulation]

    yield outcome
    pool.close()


def make_folder(folder: Path, nodes: tuple[int, ...]) -> Path:
    for node in range(len(nodes)):
        (folder / f"node{node}").mkdir()
    return folder


def train(workers: WorkerPools, folder: Path, cell: Cell) -> Run:
    """Runs the cell's script to its end; its outputs are in the run's folders."""
    make_folder(folder, cell.nodes)
    plan = folder / "plan.json"
    cell.plan.save(plan)
    if cell.way != SHIM:
        edited_script(cell.script, cell.way, str(plan), folder)
    accumulation = ACCUMULATIONS[cell.accumulation][1]
    run = Run(cell.script, str(folder), SCRIPTS_BATCH_SIZE, accumulation, cell.way, str(plan))
    workers(sum(cell.nodes)).run(start, run, nodes=cell.nodes, timeout=90)
    return run


def check(workers: WorkerPools, oracle: Oracle, folder: Path, cell: Cell) -> None:
    run = train(workers, folder, cell)
    compare(outcome_of(run), oracle(cell.script, run.accumulation))


@pytest.mark.parametrize("cell", sorted(pairwise(), key=lambda cell: sum(cell.nodes)), ids=str)
def test_script_gives_the_result_of_one_process(workers, oracle, tmp_path, cell):
    check(workers, oracle, tmp_path, cell)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("script", [*TRAINER_SCRIPTS, LOOP])
@pytest.mark.timeout(1200)
def test_script_gives_the_result_of_one_process_everywhere(workers, oracle, tmp_path, script, nodes):
    failures = []
    for cell in everything():
        if (cell.script, cell.nodes) == (script, nodes):
            folder = tmp_path / str(cell)
            folder.mkdir()
            try:
                check(workers, oracle, folder, cell)
            except AssertionError as error:
                failures.append(f"{cell}: {error}")
    assert not failures, "\n".join(failures)
