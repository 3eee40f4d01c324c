# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 1 for users' scripts: under the shim, and with the mixin or the callback, they give one process's result.

Compared are the parameters, and what the script logs: losses, gradient norms, learning rates, epochs, the total batch
size, the number of steps, samples and tokens. The default suite runs a pairwise selection (every pair of values of two
factors occurs); ``-m slow`` runs all.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from launching import launch
from trainer_cases import (
    ANY_ARGUMENT,
    LOGGED,
    LOOP,
    SCRIPTS,
    SHIM,
    TOTAL,
    TRAINER_SCRIPTS,
    WAYS,
    Outcome,
    Run,
    announced_in,
    compare,
    edited_script,
    outcome_of,
    start,
    start_alone,
)
from transformers.trainer_pt_utils import LabelSmoother
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

#: The plain loop's plans have other totals than its batch size makes, and its steps and schedule are given for them.
KEPT = {LOOP: {"LSDP_KEEP_PLAN_TOTAL": "1"}}

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

    @property
    def script_accumulation(self) -> int:
        return ACCUMULATIONS[self.accumulation][1]


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
    """`oracle(script, accumulation, arguments)`: what one process gives, which never imports this package."""
    pool = WorkerPool(1)
    known: dict[tuple, Outcome] = {}

    def outcome(script: str, accumulation: int, arguments: Mapping[str, Any] | None = None) -> Outcome:
        key = (script, accumulation, *(arguments or {}).items())
        if key not in known:
            folder = make_folder(tmp_path_factory.mktemp("oracle"), (1,))
            run = Run(script, str(folder), TOTAL, accumulation, arguments=arguments or {})
            pool.run(start_alone, run, env=dict.fromkeys(LAUNCHED))
            known[key] = outcome_of(run)
        return known[key]

    yield outcome
    pool.close()


def make_folder(folder: Path, nodes: tuple[int, ...]) -> Path:
    folder.mkdir(exist_ok=True)
    for node in range(len(nodes)):
        (folder / f"node{node}").mkdir()
    return folder


def train(
    workers: WorkerPools,
    folder: Path,
    cell: Cell,
    arguments: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
) -> Run:
    """Runs the cell's script to its end, by its plan or another one; the outputs are in the run's folders."""
    run = prepare(folder, cell, arguments, plan)
    workers(sum(cell.nodes)).run(start, run, nodes=cell.nodes, timeout=90, env=KEPT.get(cell.script))
    return run


def prepare(folder: Path, cell: Cell, arguments: Mapping[str, Any] | None = None, plan: Plan | None = None) -> Run:
    """Makes the folders of a run, its plan and its script."""
    make_folder(folder, cell.nodes)
    path = folder / "plan.json"
    (plan or cell.plan).save(path)
    if cell.way != SHIM:
        edited_script(cell.script, cell.way, str(path), folder)
    return Run(
        cell.script, str(folder), SCRIPTS_BATCH_SIZE, cell.script_accumulation, cell.way, str(path), arguments or {}
    )


def check(workers: WorkerPools, oracle: Oracle, folder: Path, cell: Cell) -> None:
    compare(outcome_of(train(workers, folder, cell)), oracle(cell.script, cell.script_accumulation))


@pytest.mark.parametrize(
    "cell",
    [
        # Four ranks import transformers on two cores.
        pytest.param(cell, marks=[pytest.mark.slow] * (sum(cell.nodes) == 4 and cell.script != LOOP))
        for cell in sorted(pairwise(), key=lambda cell: sum(cell.nodes))
    ],
    ids=str,
)
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
            try:
                check(workers, oracle, tmp_path / str(cell), cell)
            except AssertionError as error:
                failures.append(f"{cell}: {error}")
    assert not failures, "\n".join(failures)


UNEQUAL_COUNTS = Plan.from_batch_sizes([(2, 3), (6, 1)], strategy="lsdp", allow_unequal_accumulation=True)
ONE_LEFT_OVER = {"samples": 4 * TOTAL + 1}  # fewer samples than ranks in the last batch
#: Plan (None: that of the cell), arguments of the script, cell.
SPECIAL = {
    "numbers of micro-batches": (UNEQUAL_COUNTS, {}, Cell("causal_lm", "shim", (1, 1), "script", "lsdp")),
    "numbers of micro-batches, mean loss": (
        UNEQUAL_COUNTS,
        ONE_LEFT_OVER,
        Cell("sequence_classification", "mixin", (1, 1), "script", "lsdp"),
    ),
    "one sample left over": (None, ONE_LEFT_OVER, Cell("image_classification", "shim", (2, 2), "plan", "lsdp")),
    "one text left over": (None, ONE_LEFT_OVER, Cell("causal_lm", "callback", (1, 2), "both", "fsdp")),
    "equal batches": (Plan.equal(), {}, Cell("sequence_classification", "shim", (1, 2), "script", "lsdp")),
    "sizes found by the run": (Plan.auto(TOTAL), {}, Cell("causal_lm", "callback", (1, 1), "none", "lsdp")),
    "worker processes": (None, {"dataloader_num_workers": 2}, Cell("causal_lm", "shim", (2,), "none", "lsdp")),
    "last batch dropped": (None, {"dataloader_drop_last": True}, Cell("causal_lm", "mixin", (2,), "script", "lsdp")),
    "one rank": (Plan.from_batch_sizes([(6, 2)]), {}, Cell("causal_lm", "shim", (1,), "script", "lsdp")),
    "label smoothing": (None, {"label_smoothing_factor": 0.1}, Cell("causal_lm", "shim", (1, 1), "both", "ddp")),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "one rank")) for case in SPECIAL]
)
def test_special_cases_give_the_result_of_one_process(workers, oracle, tmp_path, case):
    if case == "label smoothing" and "num_items_in_batch" not in inspect.signature(LabelSmoother.__call__).parameters:
        pytest.skip("this transformers does not divide a smoothed loss by the accumulation steps (mended until 5.17)")
    plan, arguments, cell = SPECIAL[case]
    run = train(workers, tmp_path, cell, arguments, plan)
    actual = outcome_of(run)
    compare(actual, oracle(cell.script, cell.script_accumulation, arguments))
    for entry in actual.log:
        assert sum(entry[f"batch_size/rank_{rank}"] for rank in range(sum(cell.nodes))) == TOTAL


#: The script's own batch size makes the total, which the plan leaves to it.
OPEN = [
    Cell("causal_lm", "shim", (1, 1), "script", "lsdp"),
    Cell("sequence_classification", "callback", (1, 2), "none", "ddp"),
    Cell(LOOP, SHIM, (2,), "script", "lsdp"),
]


@pytest.mark.parametrize("cell", OPEN, ids=str)
def test_a_plan_without_a_total_takes_that_of_the_script(workers, oracle, tmp_path, cell):
    own = {"per_device_train_batch_size": TOTAL // sum(cell.nodes)}
    run = train(workers, tmp_path, cell, own, Plan.auto(strategy=cell.strategy))
    compare(outcome_of(run), oracle(cell.script, cell.script_accumulation))


EVALUATING = {
    "do_eval": True,
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "per_device_eval_batch_size": 4,
    "load_best_model_at_end": True,
    "save_total_limit": 2,
}


@pytest.mark.parametrize(
    ("every", "cell"),
    [
        (5, Cell("causal_lm", "shim", (1, 1), "none", "lsdp")),  # evaluates between two epochs
        (2, Cell("sequence_classification", "callback", (2,), "both", "fsdp")),
        pytest.param(2, Cell("sequence_classification", "callback", (1, 2), "both", "fsdp"), marks=pytest.mark.slow),
        pytest.param(4, Cell("sequence_classification", "mixin", (2, 2), "none", "ddp"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evaluations_and_the_best_model_are_those_of_one_process(workers, oracle, tmp_path, every, cell):
    arguments = {**EVALUATING, "eval_steps": every, "save_steps": every}
    run = train(workers, tmp_path, cell, arguments)
    # Ranks that evaluate together count their tokens together, as stock ranks do.
    together = {**arguments, "per_device_eval_batch_size": 4 * sum(cell.nodes)}
    actual, expected = outcome_of(run), oracle(cell.script, cell.script_accumulation, together)
    compare(actual, expected)
    assert actual.kept == expected.kept * len(cell.nodes) and expected.kept[0]


def test_grouping_by_length_does_not_depend_on_the_plan(workers, tmp_path):
    """Grouped in global batches; one process without this package draws another order, from the global generator."""
    arguments = {"train_sampling_strategy": "group_by_length"}
    first = train(workers, tmp_path / "a", Cell("causal_lm", "shim", (2,), "none", "lsdp"), arguments)
    second = train(workers, tmp_path / "b", Cell("causal_lm", "callback", (1, 1), "plan", "ddp"), arguments)
    compare(outcome_of(second), outcome_of(first))


def interrupt_and_resume(workers: WorkerPools, folder: Path, step: int, first: Cell, second: Cell) -> list[Outcome]:
    """What `first` gives, which saves after `step` steps, and what `second` gives, which goes on from there."""
    saving = {"save_steps": step, **({"save_strategy": "steps"} if first.script in ANY_ARGUMENT else {})}
    whole = train(workers, folder / "whole", first, saving)
    checkpoint = {"resume_from_checkpoint": f"{whole.folder}/node{{node}}/checkpoint-{step}"}
    rest = train(workers, folder / "rest", second, checkpoint)
    return [outcome_of(whole), outcome_of(rest)]


#: Script, way, step, nodes, accumulation, strategy. An epoch has 5 steps without the script's accumulation, 3 with it.
SAME_PLAN = [
    ("causal_lm", "callback", 3, (1, 1), "none", "lsdp"),
    ("sequence_classification", "mixin", 6, (1, 2), "plan", "ddp"),
    pytest.param("image_classification", "shim", 4, (2, 2), "both", "fsdp", marks=pytest.mark.slow),
    (LOOP, SHIM, 4, (2,), "both", "lsdp"),
]


@pytest.mark.parametrize(("script", "way", "step", "nodes", "accumulation", "strategy"), SAME_PLAN)
def test_resumed_script_is_bit_identical(workers, tmp_path, script, way, step, nodes, accumulation, strategy):
    cell = Cell(script, way, nodes, accumulation, strategy)
    whole, rest = interrupt_and_resume(workers, tmp_path, step, cell, cell)
    assert [names_and_values(entry) for entry in rest.log if entry["step"] > step] == [
        names_and_values(entry) for entry in whole.log if entry["step"] > step
    ]
    assert rest.parameters.keys() == whole.parameters.keys()
    assert all(torch.equal(rest.parameters[name], value) for name, value in whole.parameters.items())


def names_and_values(entry: Mapping[str, float]) -> dict[str, float]:
    """Of a step's log, what a script without this package logs too, except for times."""
    return {name: value for name, value in entry.items() if name in LOGGED}


#: Script, way, step; then nodes, accumulation and strategy before the interruption, and after it.
OTHER_PLANS = [
    ("causal_lm", "shim", 6, ((1, 2), "plan", "fsdp"), ((2,), "none", "lsdp")),
    pytest.param(
        "sequence_classification",
        "callback",
        3,
        ((2, 2), "none", "lsdp"),
        ((1, 2), "plan", "fsdp"),
        marks=pytest.mark.slow,
    ),
    ("image_classification", "mixin", 4, ((2,), "both", "ddp"), ((1, 1), "script", "lsdp")),
    (LOOP, SHIM, 3, ((1, 1), "none", "lsdp"), ((2,), "plan", "ddp")),
]


@pytest.mark.parametrize(("script", "way", "step", "before", "after"), OTHER_PLANS)
def test_resuming_under_another_plan_equals_one_process(workers, oracle, tmp_path, script, way, step, before, after):
    first, second = Cell(script, way, *before), Cell(script, way, *after)
    whole, rest = interrupt_and_resume(workers, tmp_path, step, first, second)
    expected = oracle(script, first.script_accumulation)
    compare(whole, expected)
    compare(rest, expected, first_step=step + 1)


def all_interruptions(script: str) -> Iterator[tuple[int, Cell, Cell]]:
    """Step, cell before and cell after, for every two layouts with and without the script's accumulation.

    Ways, strategies and the plans' accumulation take turns. The plain loop goes on with as many ranks as before:
    accelerate steps its scheduler once a rank.
    """
    ways = itertools.cycle([SHIM] if script == LOOP else WAYS)
    strategies = itertools.cycle(itertools.permutations(STRATEGIES, 2))
    plans = {1: itertools.cycle(itertools.product(("none", "plan"), repeat=2))}
    plans[2] = itertools.cycle(itertools.product(("script", "both"), repeat=2))
    for (before, after), own in itertools.product(itertools.product(NODES, repeat=2), (1, 2)):
        (first, second), (accumulation, later), way = next(strategies), next(plans[own]), next(ways)
        if script == LOOP and sum(before) != sum(after):
            continue
        step = 4 if own == 2 else 3
        yield step, Cell(script, way, before, accumulation, first), Cell(script, way, after, later, second)


@pytest.mark.slow
@pytest.mark.parametrize("script", [*TRAINER_SCRIPTS, LOOP])
@pytest.mark.timeout(1200)
def test_resuming_under_any_plan_equals_one_process(workers, oracle, tmp_path, script):
    failures = []
    for number, (step, first, second) in enumerate(all_interruptions(script)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            _, rest = interrupt_and_resume(workers, folder, step, first, second)
            compare(rest, oracle(script, first.script_accumulation), first_step=step + 1)
        except AssertionError as error:
            failures.append(f"{first} at step {step}, then {second}: {error}")
    assert not failures, "\n".join(failures)


#: Script, way and ranks of each node. In processes of their own, a script decides what is imported first.
LAUNCHES = [
    *(Cell(script, way, (1, 1), "none", "lsdp") for script in TRAINER_SCRIPTS for way in WAYS),
    Cell(LOOP, SHIM, (2,), "plan", "fsdp"),
    Cell("sequence_classification", "shim", (1, 2), "both", "lsdp"),
]


@pytest.mark.slow
@pytest.mark.parametrize("cell", LAUNCHES, ids=str)
@pytest.mark.timeout(300)
def test_launched_script_gives_the_result_of_one_process(oracle, tmp_path, cell):
    """By `accelerate launch`, once a node; here all nodes share the script's output folder, checkpoints too."""
    options = {"save_steps": 3}
    if cell.script in ANY_ARGUMENT:
        options.update(log_level="info", save_strategy="steps")
    run = prepare(tmp_path, cell, options)
    if cell.way == SHIM:
        command = ["-m", "accelerate_lshdp.run", "--plan", run.plan, SCRIPTS / f"{cell.script}.py"]
    else:
        command = [tmp_path / f"{cell.script}.py"]
    ranks = sum(cell.nodes)
    result = launch(
        [*command, *run.command_line(0)],
        ranks,
        nodes=cell.nodes,
        env=KEPT.get(cell.script),
        launcher="accelerate",
        timeout=140,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    expected = oracle(cell.script, cell.script_accumulation)
    announced = announced_in(result.stderr) if "log_level" in options else expected.announced
    run.announced.write_text(json.dumps(announced))
    compare(outcome_of(run), expected)
