# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``free_memory`` gives models and optimizers back as they were, to plain torch or to another accelerator."""

from __future__ import annotations

import pytest
import torch
from test_prepare_again import train
from test_unusual_scripts import CASE, loader_of, plan_of, start, values
from torch import nn
from torch.utils.data import DataLoader
from training_cases import collate, make_optimizer, relative_error

from accelerate_lshdp import LSHDPAccelerator


whole = pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("lsdp", (1, 1))])


def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple]:
    """All hooks and all attributes of instances, of modules, parameters and the optimizer, without their values."""
    found = []
    for name, module in model.named_modules():
        kept = {key: len(value) for key, value in vars(module).items() if "_hooks" in key and isinstance(value, dict)}
        found.append((name, sorted(vars(module)), kept))
    for name, parameter in model.named_parameters():
        found.append((name, sorted(vars(parameter)), len(parameter._post_accumulate_grad_hooks or ())))
    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    return [*found, ("optimizer", hooks)]


def train_and_free(strategy: str) -> tuple[list, list, dict, dict]:
    model = CASE.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    before = attached(model, optimizer)
    accelerator = LSHDPAccelerator(plan=plan_of(strategy, (2, 1)))
    prepared = accelerator.prepare(model, optimizer, loader_of(0, 9))
    trained = train(accelerator, *prepared)
    accelerator.free_memory()
    vars(model).pop("_is_accelerate_prepared")  # accelerate's own mark, which it leaves on models
    return before, attached(model, optimizer), trained, values(model)


@whole
def test_free_memory_takes_off_all_hooks_and_keeps_values(workers, strategy, nodes):
    for before, after, trained, kept in workers(2).run(train_and_free, strategy, nodes=nodes):
        assert after == before
        assert relative_error(kept, trained) == 0


def write_after_free_memory(strategy: str) -> float:
    """By how much a rank's parameters change when rank 1 doubles its own."""
    accelerator, model, optimizer, loader = start(strategy)
    train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    before = values(model)
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    accelerator.wait_for_everyone()
    return relative_error(values(model), before)


@whole
def test_freed_parameters_are_of_one_rank_alone(workers, strategy, nodes):
    first, second = workers(2).run(write_after_free_memory, strategy, nodes=nodes)
    assert (first, second) == (0, 1)


def train_with_two_accelerators(strategy: str, then: str) -> dict:
    accelerator, model, optimizer, loader = start(strategy)
    train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    del accelerator
    second = LSHDPAccelerator(plan=plan_of(then, (1, 2)))
    model, optimizer, loader = second.prepare(model, make_optimizer(model, 1e-2, 0.0), loader_of(0, 9))
    return train(second, model, optimizer, loader)


def train_plainly_twice() -> dict:
    """As above, in one process with plain torch."""
    model = CASE.model().double()
    for _ in range(2):
        optimizer = make_optimizer(model, 1e-2, 0.0)
        for batch in DataLoader(CASE.dataset(9, torch.float64), batch_size=3, collate_fn=collate):
            CASE.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(
    ("strategy", "then", "nodes"), [("lsdp", "lsdp", (2,)), ("lsdp", "ddp", (2,)), ("ddp", "fsdp", (1, 1))]
)
def test_another_accelerator_takes_a_freed_model(workers, strategy, then, nodes):
    expected = train_plainly_twice()
    for trained in workers(2).run(train_with_two_accelerators, strategy, then, nodes=nodes):
        assert relative_error(trained, expected) <= 1e-12


def go_on_after_free_memory(strategy: str) -> None:
    accelerator, model, optimizer, loader = start(strategy)
    train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    train(accelerator, model, optimizer, loader)


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_training_after_free_memory_is_refused(workers, strategy, nodes):
    errors = workers(2).run(go_on_after_free_memory, strategy, nodes=nodes, expect_failure=True)
    assert all("after accelerator.free_memory()" in error.message for error in errors)
