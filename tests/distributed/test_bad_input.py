# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 3: what is wrong on any rank is the same clear error on every rank within seconds, and nothing is written.

An error is clear if it says what was found, what was expected and what to do. A connection error of a rank whose
neighbour has died is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DataLoaderConfiguration, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import CASES, collate, make_optimizer
from workers import WorkerError

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


TIMEOUT_SECONDS = 30
GOOD = Plan.from_batch_sizes([3, 1], strategy="lsdp").to_dict()


def same_error(errors: list[WorkerError | None], *parts: str) -> None:
    """Every rank raised, with one message that has these parts in this order."""
    assert None not in errors, errors
    assert len({error.message for error in errors}) == 1, "\n".join(map(str, errors))
    message, position = errors[0].message, 0
    for part in parts:
        assert part in message[position:], f"{part!r} is not, or not in its place, in: {message}"
        position = message.index(part, position) + len(part)


# Plans


def start(folder: str, plans: list[str | None], environments: list[dict[str, str]], keywords: dict[str, Any]) -> None:
    """Makes an accelerator where each rank was told its own plan (a value of the variable; None: unset)."""
    os.chdir(folder)
    rank = dist.get_rank()
    if plans[rank] is not None:
        os.environ["ACCELERATE_LSHDP_PLAN"] = plans[rank]
    os.environ.update(environments[rank])
    LSHDPAccelerator(project_dir="project", log_with="all", **keywords)


def refused(
    workers: Callable,
    tmp_path: Any,
    plans: str | list[str | None] | None,
    *parts: str,
    environments: dict[str, str] | list[dict[str, str]] | None = None,
    nodes: tuple[int, int] = (1, 1),
    **keywords: Any,
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    plans = plans if isinstance(plans, list) else [plans] * 2
    environments = environments if isinstance(environments, list) else [environments or {}] * 2
    arguments = (str(folder), plans, environments, keywords)
    errors = workers(2).run(start, *arguments, nodes=nodes, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, *parts)
    assert list(folder.iterdir()) == []


def changed(**changes: Any) -> str:
    """A good plan with some keys changed; "batch.total" is one in a section."""
    document = deepcopy(GOOD)
    for path, value in changes.items():
        place = document
        *sections, key = path.split("__")
        for section in sections:
            place = place[int(section) if section.isdigit() else section]
        place[key] = value
    return json.dumps(document)


VARIABLE = "ACCELERATE_LSHDP_PLAN: "
SIZE = "batch.ranks[1].micro_batch_size: "
MALFORMED = {
    "not JSON": ('{"version": 1,', VARIABLE + "found text that is not JSON", "line 1", "expected", "Correct"),
    "empty": (" ", VARIABLE + "found nothing", "expected a path or JSON", "Set it"),
    "missing": ("no/such/plan.json", "no/such/plan.json: found no such file", "expected a plan", "Correct the path"),
    "directory": (".", ".: found a directory", "expected a plan file", "Give the path of the file"),
    "version": (changed(version=2), VARIABLE + "version: found 2", "expected 1", "Write the plan again"),
    "unknown key": (changed(stratgey="ddp"), VARIABLE + "stratgey: found an unknown key", "expected", "Did you mean"),
    "sum": (changed(batch__total=5), VARIABLE + "batch", "found", "5", "expected", "4"),
    "zero": (changed(batch__ranks__1__micro_batch_size=0), SIZE + "found 0", "expected an integer from 1", "Correct"),
    "negative": (changed(batch__ranks__1__micro_batch_size=-3), SIZE + "found -3", "expected an integer", "Correct"),
    "huge": (changed(batch__ranks__1__micro_batch_size=10**12), SIZE + "found 1000000000000", "expected", "Correct"),
    "strategy": (changed(strategy="lspd"), "strategy: found", "lspd", "expected one of", 'Did you mean "lsdp"?'),
    "unequal accumulation": (
        changed(batch__ranks__1__accumulation_steps=2, batch__total=5),
        "batch.ranks: found accumulation_steps [1, 2]",
        "expected the same number",
        "allow_unequal_accumulation",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_plan(workers, tmp_path, name):
    text, *parts = MALFORMED[name]
    refused(workers, tmp_path, text, "ranks 0, 1: PlanError: ", *parts)


def plan_text(sizes: list, **keywords: Any) -> str:
    return Plan.from_batch_sizes(sizes, **keywords).to_json()


def test_plan_for_another_number_of_ranks(workers, tmp_path):
    parts = ("batch.ranks: found batch sizes for 3 ranks", "expected 2", "Launch 3 processes, or make a plan for 2")
    refused(workers, tmp_path, plan_text([2, 1, 1]), *parts)


@pytest.mark.parametrize("strategy", ["lsdp", "fsdp"])
def test_unequal_accumulation_inside_a_shard_group(workers, tmp_path, strategy):
    text = plan_text([(2, 1), (1, 2)], strategy=strategy, allow_unequal_accumulation=True)
    parts = ("found accumulation_steps [1, 2] on ranks [0, 1]", "expected equal numbers", "Make them equal, or use")
    refused(workers, tmp_path, text, *parts, nodes=(2,))


DIFFERING = {
    "sizes": [plan_text([3, 1]), plan_text([1, 3])],
    "strategy": [plan_text([3, 1], strategy="lsdp"), plan_text([3, 1], strategy="ddp")],
    "one has none": [plan_text([3, 1]), None],
}


@pytest.mark.parametrize("name", DIFFERING)
def test_plan_that_differs_between_ranks(workers, tmp_path, name):
    parts = ("do not agree on the plan", "rank 0: ", "[3, 1]", "rank 1: ", "Give all nodes the same")
    refused(workers, tmp_path, DIFFERING[name], *parts)


def test_file_that_differs_between_ranks(workers, tmp_path):
    """As on two machines: one path, two contents."""
    for rank, sizes in enumerate(([3, 1], [2, 2])):
        Plan.from_batch_sizes(sizes).save(tmp_path / f"plan{rank}.json")
    plans = [str(tmp_path / f"plan{rank}.json") for rank in range(2)]
    refused(workers, tmp_path, plans, "do not agree on the plan", "rank 0: ", "[3, 1]", "rank 1: ", "[2, 2]")


def test_file_that_one_rank_lacks(workers, tmp_path):
    Plan.from_batch_sizes([3, 1]).save(tmp_path / "plan.json")
    plans = [str(tmp_path / "plan.json"), str(tmp_path / "elsewhere.json")]
    refused(workers, tmp_path, plans, "rank 1: PlanError: ", "elsewhere.json: found no such file", "Correct the path")


# Options


def test_strategy_against_the_plan(workers, tmp_path):
    parts = ("strategy='ddp' was given as a keyword", "the plan says 'lsdp'", "give only one of them")
    refused(workers, tmp_path, plan_text([3, 1]), *parts, lsdp_plugin=LSDPPlugin(strategy="ddp"))


def test_communication_against_the_plan(workers, tmp_path):
    parts = ("communication_dtype='bf16' was given as a keyword", "the plan says 'fp32'", "give only one of them")
    refused(workers, tmp_path, plan_text([3, 1]), *parts, lsdp_plugin=LSDPPlugin(communication_dtype="bf16"))


def test_batch_sizes_against_the_plan(workers, tmp_path):
    parts = ("batch_sizes=[2, 2] was given as a keyword", "the plan says [(3, 1), (1, 1)]", "give only one of them")
    refused(workers, tmp_path, plan_text([3, 1]), *parts, batch_sizes=[2, 2])


@pytest.mark.parametrize("sizes", [[0, 4], [3, -1], [3, 2**40], [3, "1"], [3, (1, 2, 3)], [], 4])
def test_impossible_batch_sizes(workers, tmp_path, sizes):
    refused(workers, tmp_path, None, "ranks 0, 1: PlanError: ", "found", "expected", batch_sizes=sizes)


IMPOSSIBLE = {
    "LSDP_STRATEGY": ("magic", "strategy='magic' from the environment", "use one of ddp, "),
    "LSDP_COMMUNICATION_DTYPE": (
        "int3",
        "communication_dtype='int3' from the environment",
        f"use one of {', '.join(WIRE_FORMATS)}",
    ),
    "LSDP_MIXED_PRECISION": ("fp7", "mixed_precision='fp7' from the environment", "use one of no, bf16, fp16"),
    "LSDP_PREFETCH": ("many", "LSDP_PREFETCH", "found 'many'", "expected"),
    "LSDP_BUCKET_MEGABYTES": ("nan", "bucket_megabytes=nan", "should be positive"),
    "LSDP_PIN_MEMORY": ("perhaps", "LSDP_PIN_MEMORY: found 'perhaps'", "expected true or false"),
    "LSDP_BATCH_NORM": ("ignore", "batch_norm='ignore'", "use one of error, local, sync"),
    "LSDP_LOSS_WEIGHTING": ("rank", "loss_weighting='rank'", "use one of sample, tokens, none"),
    "ACCELERATE_USE_DEEPSPEED": ("true", "DeepSpeed is switched on by ACCELERATE_USE_DEEPSPEED", "Use a config file"),
    "ACCELERATE_LSHDP_NODES": ("1,one", "ACCELERATE_LSHDP_NODES='1,one' should be ranks per node"),
}


@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
@pytest.mark.parametrize("variable", IMPOSSIBLE)
def test_impossible_variable(workers, tmp_path, variable, where):
    value, *parts = IMPOSSIBLE[variable]
    first = {variable: value} if where == "everywhere" else {}
    if variable == "ACCELERATE_LSHDP_NODES" and where == "on rank 1":
        parts = ["ACCELERATE_LSHDP_NODES differs between ranks", "set one value"]
    refused(workers, tmp_path, None, *parts, environments=[first, {variable: value}])


def test_option_that_differs_between_ranks(workers, tmp_path):
    parts = ("do not agree on the plan and the options", "rank 0: ", "auto", "rank 1: ", "none", "Give all nodes")
    refused(workers, tmp_path, None, *parts, environments=[{}, {"LSDP_LOSS_WEIGHTING": "none"}])


@pytest.mark.parametrize("keyword", ["fsdp_plugin", "deepspeed_plugin"])
def test_plugin_of_another_engine(workers, tmp_path, keyword):
    plugin = FullyShardedDataParallelPlugin() if keyword == "fsdp_plugin" else {"zero_stage": 2}
    parts = (f"{keyword} cannot be combined with LSHDPAccelerator", "choose a strategy in the plan")
    refused(workers, tmp_path, None, *parts, **{keyword: plugin})


def state_first() -> None:
    PartialState()
    LSHDPAccelerator()


def test_state_without_the_other_processes(workers):
    """accelerate's state knows nothing of other CPU processes if it is made first: each rank would train alone."""
    errors = workers(2).run(state_first, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, "1 process", "WORLD_SIZE", "2", "before")


# Training


def prepared(plan: Plan, model: nn.Module | None = None, **keywords: Any) -> tuple:
    accelerator = LSHDPAccelerator(plan=plan, **keywords)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(2, (24,))), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def with_batch_norm(sizes: list) -> None:
    prepared(Plan.from_batch_sizes(sizes), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


@pytest.mark.parametrize("sizes", [[3, 1], [(2, 2), (2, 2)]])
def test_batch_norm_under_unequal_batches(workers, sizes):
    errors = workers(2).run(with_batch_norm, sizes, nodes=(1, 1), timeout=TIMEOUT_SECONDS, expect_failure=True)
    advice = ("LSDPPlugin(batch_norm='local')", "LSDP_BATCH_NORM=local")
    same_error(errors, "batch normalisation (1", "Replace it", *advice)


def train_in_eval_mode(strategy: str) -> None:
    accelerator, model, _, loader = prepared(Plan.from_batch_sizes([3, 1], strategy=strategy))
    model.eval()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))


def train_outside_accumulate(strategy: str) -> None:
    accelerator, model, _, loader = prepared(Plan.from_batch_sizes([(2, 2), (1, 2)], strategy=strategy))
    for batch in loader:
        accelerator.backward(loss_of(model, batch))


def train_past_the_accelerator(strategy: str) -> None:
    accelerator, model, optimizer, loader = prepared(Plan.from_batch_sizes([3, 1], strategy=strategy))
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp"])
@pytest.mark.parametrize(
    ("train", "parts"),
    [
        (train_in_eval_mode, ("backward", "evaluation pass", "call model.train()")),
        (train_outside_accumulate, ("accumulates", "outside accelerator.accumulate()", "with accelerator.accumulate")),
        (train_past_the_accelerator, ("loss.backward()", "neither weighted nor summed", "call accelerator.backward")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_backward(workers, strategy, train, parts):
    errors = workers(2).run(train, strategy, nodes=(1, 1), timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, *parts)


CALLS: dict[str, Callable[[LSHDPAccelerator, torch.Tensor], Any]] = {
    "gather": lambda accelerator, value: accelerator.gather(value),
    "gather_for_metrics": lambda accelerator, value: accelerator.gather_for_metrics(value),
    "gather_for_metrics of objects": lambda accelerator, value: accelerator.gather_for_metrics([1], True),
    "reduce": lambda accelerator, value: accelerator.reduce(value),
    "pad_across_processes": lambda accelerator, value: accelerator.pad_across_processes(value),
    "wait_for_everyone": lambda accelerator, value: accelerator.wait_for_everyone(),
}


def collect_in_every_micro_batch(call: str, strategy: str, sizes: list, after_backward: bool) -> None:
    plan = Plan.from_batch_sizes(sizes, strategy=strategy, allow_unequal_accumulation=True)
    accelerator, model, optimizer, loader = prepared(plan)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            if not after_backward:
                CALLS[call](accelerator, loss.detach())
            accelerator.backward(loss)
            if after_backward:
                CALLS[call](accelerator, loss.detach())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("after_backward", [False, True], ids=["before backward", "after backward"])
@pytest.mark.parametrize(
    ("call", "strategy", "sizes"),
    [
        *((call, "ddp", [(2, 3), (1, 1)]) for call in CALLS),
        ("gather", "lsdp", [(2, 3), (1, 1)]),
        ("gather", "ddp", [(1, 1), (2, 2)]),
        ("gather", "lsdp", [(1, 2), (2, 3)]),
    ],
)
def test_collective_where_ranks_do_not_meet(workers, call, strategy, sizes, after_backward):
    """Never a hang: one rank is still in its first micro-batch when the other one reduces gradients."""
    arguments = (call, strategy, sizes, after_backward)
    errors = workers(2).run(
        collect_in_every_micro_batch, *arguments, nodes=(1, 1), timeout=TIMEOUT_SECONDS, expect_failure=True
    )
    steps = [steps for _, steps in sizes]
    parts = ("found gather" if call.startswith("gather") else f"found {call} ", "not the last one of its step")
    same_error(errors, *parts, f"different numbers of micro-batches ({steps})", "if accelerator.sync_gradients:")


def collect_where_ranks_meet(strategy: str) -> list[int]:
    plan = Plan.from_batch_sizes([(2, 3), (1, 1)], strategy=strategy, allow_unequal_accumulation=True)
    accelerator, model, optimizer, loader = prepared(plan)
    sizes = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            if accelerator.sync_gradients:
                sizes.append(len(accelerator.gather_for_metrics(batch[1])))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.reduce(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.wait_for_everyone()
            with accelerator.evaluation():
                sizes.append(sum(len(accelerator.gather_for_metrics(labels)) for _, labels in loader_of(accelerator)))
    return sizes


def loader_of(accelerator: LSHDPAccelerator) -> DataLoader:
    return accelerator.prepare(DataLoader(TensorDataset(torch.randn(5, 4), torch.zeros(5)), batch_size=2))


@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_collectives_where_ranks_meet_are_not_refused(workers, strategy):
    """24 samples in global batches of 7, whose last micro-batches have 2 and 1; the last batch is short."""
    first, second = workers(2).run(collect_where_ranks_meet, strategy, nodes=(1, 1), timeout=TIMEOUT_SECONDS)
    assert first == second
    assert first[:2] == [3, 5] and len(first) == 8 and first[1::2] == [5] * 4


# Preparing


def prepare_after_a_step(strategy: str) -> None:
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy=strategy))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    accelerator.prepare(model, optimizer)


@pytest.mark.parametrize("strategy", ["lsdp", "fsdp"])
def test_optimizer_that_has_stepped(workers, strategy):
    errors = workers(2).run(prepare_after_a_step, strategy, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, "the optimizer has already stepped", "call prepare() before the first step")


def dispatch() -> None:
    prepared(Plan.from_batch_sizes([3, 1]), dataloader_config=DataLoaderConfiguration(dispatch_batches=True))


def test_dispatched_batches_with_sizes(workers):
    errors = workers(2).run(dispatch, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, "found dispatch_batches=True", "expected one or the other", "Set dispatch_batches=False")


def train_with_a_foreign_optimizer() -> None:
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy="ddp"))
    other = make_optimizer(case.model(), 1e-3, 0.0)
    loader = DataLoader(case.dataset(8, torch.float32), batch_size=2, collate_fn=collate)
    model, other, loader = accelerator.prepare(case.model(), other, loader)
    model.train()
    for batch in loader:
        accelerator.backward(case.loss(model, batch))


def test_optimizer_of_another_model(workers):
    errors = workers(2).run(train_with_a_foreign_optimizer, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, "none of the prepared optimizers updates a prepared model", "Make the optimizer from")
