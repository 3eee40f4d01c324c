# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`model.no_sync()`, LocalSGD, and what scripts tell torch's DDP: each works as there, or is refused by name."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType
from exactness import full, prepared
from strategy_cells import SIZES_OF_4, cells
from torch import nn
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, relative_error

from accelerate_lshdp import LSHDPAccelerator, Plan


CASE = CASES["vit"]
LEARNING_RATE = 1e-2
SAMPLES = 15  # global batches of 4; the last is of 3


def start(plan: Plan, **options):
    model, data = CASE.model().double(), CASE.dataset(SAMPLES, torch.float64)
    accelerator, model, optimizer, loader = prepared(plan, model, data, **options)
    model.train()
    return accelerator, model, optimizer, loader


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def samples(indices) -> dict:
    data = CASE.dataset(SAMPLES, torch.float64)
    return collate([data[index] for index in indices])


# model.no_sync()


def plan_of(strategy: str, sizes: list[int]) -> Plan:
    if strategy == "collectives":
        return Plan.from_batch_sizes(sizes, strategy="lsdp", intra_node="collectives")
    return Plan.from_batch_sizes(sizes, strategy=strategy)


def accumulate_by_hand(strategy: str, sizes: list[int]) -> tuple[dict, tuple[str, bool], int]:
    accelerator, model, optimizer, loader = start(plan_of(strategy, sizes))
    names = list(CASE.model().state_dict())
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            with model.no_sync():
                accelerator.backward(CASE.loss(model, batch) / 2)
        else:
            accelerator.backward(CASE.loss(model, batch) / 2)
            optimizer.step()
            optimizer.zero_grad()
    unpickled = pickle.loads(pickle.dumps(model.no_sync))
    with unpickled():
        nothing = (type(unpickled()).__name__, list(model.state_dict()) == names)
    return values(model), nothing, accelerator.completed_steps


@cells(("ddp", (2,)), ("lsdp", (1, 1)), ("lsdp", (2,)), ("collectives", (2,)), ("fsdp", (2,)))
def test_no_sync_of_the_prepared_model_is_that_of_ddp(workers, strategy, nodes):
    model = CASE.model().double()
    optimizer = make_optimizer(model, LEARNING_RATE, 0.0)
    for first in (0, 8):
        batches = [range(first, first + 4), range(first + 4, min(first + 8, SAMPLES))]
        for batch in batches:
            (CASE.loss(model, samples(batch)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks = sum(nodes)
    told = workers(ranks).run(accumulate_by_hand, strategy, SIZES_OF_4[ranks], nodes=nodes)
    for parameters, nothing, steps in told:
        assert relative_error(parameters, values(model)) <= 1e-12
        assert nothing == ("nullcontext", True) and steps == 2


def gradients_between_micro_batches() -> dict:
    accelerator, model, optimizer, loader = start(Plan.from_batch_sizes([3, 1]), gradient_accumulation_steps=2)
    batch = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(CASE.loss(model, batch))
    dist.barrier()  # the other rank has added its part
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_ranks_of_a_node_share_one_unfinished_gradient(workers, nodes):
    """What accelerate's `test_sync` takes for a gradient that was summed too early: on one node nothing is missing."""
    model = CASE.model().double()
    whole = {}
    for rank, part in enumerate((range(3), range(3, 4))):
        model.zero_grad()
        (CASE.loss(model, samples(part)) * len(part) / 8).backward()
        whole[rank] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    node = {name: whole[0][name] + whole[1][name] for name in whole[0]}
    for rank, found in enumerate(workers(2).run(gradients_between_micro_batches, nodes=nodes)):
        # Alone on its node a rank counts double: what is summed over nodes is divided by the ranks first.
        expected = node if nodes == (2,) else {name: 2 * gradient for name, gradient in whole[rank].items()}
        assert relative_error(found, expected) <= 1e-12


def step_without_sum(strategy: str) -> None:
    accelerator, model, optimizer, loader = start(Plan.from_batch_sizes([2, 2], strategy=strategy))
    batch = next(iter(loader))
    with model.no_sync():
        loss = CASE.loss(model, batch)
    accelerator.backward(loss)  # in DDP, too, the forward decides
    optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp"])
def test_a_step_outside_no_sync_with_gradients_of_one_rank_is_an_error(workers, strategy):
    for error in workers(2).run(step_without_sum, strategy, expect_failure=True):
        assert "were not summed over the ranks" in error.message


# LocalSGD


def train_locally(sizes: list[int], strategy: str) -> tuple[dict, dict, str | None]:
    accelerator, model, optimizer, loader = start(plan_of(strategy, sizes))
    before = values(model)
    error = None
    try:
        local_sgd = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)
        local_sgd.__enter__()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(CASE.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
        local_sgd.__exit__(None, None, None)
    except RuntimeError as found:  # as it ends a script, without the average at the end
        error = str(found)
    return before, values(model), error


@pytest.mark.parametrize(
    ("sizes", "strategy", "nodes"),
    [([2, 2], "ddp", (2,)), ([2, 2], "ddp", (1, 1)), ([3, 1], "ddp", (2,)), ([3, 1], "lsdp", (1, 1))],
)
def test_local_sgd_steps_alone_and_averages(workers, sizes, strategy, nodes):
    models = [CASE.model().double() for _ in range(2)]
    optimizers = [make_optimizer(model, LEARNING_RATE, 0.0) for model in models]
    # As the plan cuts 15 samples: global batches of 4, the last of 3 by largest remainder.
    last = {2: (2, 1), 3: (2, 1)}[sizes[0]]
    for number, first in enumerate(range(0, SAMPLES, 4)):
        parts, begin = sizes if first + 4 <= SAMPLES else last, first
        for model, optimizer, size in zip(models, optimizers, parts, strict=True):
            CASE.loss(model, samples(range(begin, begin + size))).backward()
            optimizer.step()
            optimizer.zero_grad()
            begin += size
        if number % 2 == 1:
            with torch.no_grad():
                for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
    for _, parameters, error in workers(2).run(train_locally, sizes, strategy, nodes=nodes):
        assert error is None
        assert relative_error(parameters, values(models[0])) <= 1e-12


@pytest.mark.parametrize("strategy", ["lsdp", "collectives", "fsdp"])
def test_local_sgd_is_refused_where_ranks_have_no_parameters_of_their_own(workers, strategy):
    for before, after, error in workers(2).run(train_locally, [2, 2], strategy):
        assert "as LocalSGD makes it" in error and "strategy ddp" in error
        assert all(torch.equal(after[name], before[name]) for name in before)


# Options of torch's DDP


def make_with(options: dict) -> None:
    LSHDPAccelerator(
        plan=Plan.equal(strategy="ddp"), kwargs_handlers=[DistributedDataParallelKwargs(**options)], cpu=True
    )


@pytest.mark.parametrize("name", ["comm_hook", "comm_wrapper"])
def test_hooks_of_ddp_are_refused_by_name(name):
    with pytest.raises(RuntimeError if dist.is_initialized() else ValueError, match=f"{name}=.*communication_dtype"):
        make_with({name: DDPCommunicationHookType.BF16})


def test_options_of_ddp_without_effect_are_named_once(caplog):
    with caplog.at_level("WARNING"):
        make_with({"bucket_cap_mb": 50, "static_graph": True, "find_unused_parameters": True})
    named = [record.message for record in caplog.records if "DistributedDataParallelKwargs" in record.message]
    assert len(named) == 1 and "bucket_cap_mb=50, static_graph=True" in named[0]
    assert "find_unused_parameters" not in named[0]  # what it asks for is always so


def where_gradients_are(strategy: str) -> list[list[int]]:
    """Addresses of all gradients after each of three batches of one step."""
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes([2, 2], strategy=strategy), cpu=True, gradient_accumulation_steps=3
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    loader = DataLoader([{"x": torch.ones(4) * place} for place in range(12)], batch_size=2)
    model, loader = accelerator.prepare(model, loader)
    addresses = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]).mean())
        addresses.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    return addresses


@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_gradients_that_wait_are_where_they_are_summed(workers, strategy):
    # Else there would be two copies: those that wait, and the memory in which they are sent.
    for addresses in workers(2).run(where_gradients_are, strategy, nodes=(1, 1)):
        assert len(addresses) == 3 and addresses[0] == addresses[1] == addresses[2]
