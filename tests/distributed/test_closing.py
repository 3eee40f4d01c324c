# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Closing an engine gives models back as they were; after ``free_memory`` another accelerator may take them."""

from __future__ import annotations

import pytest
import torch
from test_prepare_again import train
from test_unusual_scripts import CASE, loader_of, plain, plan_of, start, values
from torch import nn
from torch.utils.data import DataLoader
from training_cases import collate, make_optimizer, relative_error

from accelerate_lshdp import LSHDPAccelerator


whole = pytest.mark.parametrize(
    ("strategy", "nodes"), [("ddp", (1, 1)), ("ddp", (2,)), ("lsdp", (2,)), ("lsdp", (1, 1))]
)


def attached(model: nn.Module) -> list[tuple]:
    """All hooks and all attributes of instances, of modules and parameters, without their values."""
    found = []
    for name, module in model.named_modules():
        kept = {key: len(value) for key, value in vars(module).items() if "_hooks" in key and isinstance(value, dict)}
        found.append((name, sorted(vars(module)), kept))
    for name, parameter in model.named_parameters():
        found.append((name, sorted(vars(parameter)), len(parameter._post_accumulate_grad_hooks or ())))
    return found


def train_and_close(strategy: str) -> tuple[list, list, dict, dict]:
    model = CASE.model().double()
    before = attached(model)
    accelerator = LSHDPAccelerator(plan=plan_of(strategy, (2, 1)))
    prepared = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader_of(0, 9))
    trained = train(accelerator, *prepared)
    accelerator.session.engine.close()
    vars(model).pop("_is_accelerate_prepared")  # accelerate's own mark, which it leaves on models
    return before, attached(model), trained, values(model)


@whole
def test_closing_takes_off_all_hooks_and_keeps_values(workers, strategy, nodes):
    for before, after, trained, kept in workers(2).run(train_and_close, strategy, nodes=nodes):
        assert after == before
        assert relative_error(kept, trained) == 0


def write_after_closing(strategy: str) -> float:
    """By how much a rank's parameters change when rank 1 doubles its own."""
    accelerator, model, optimizer, loader = start(strategy)
    train(accelerator, model, optimizer, loader)
    accelerator.session.engine.close()
    before = values(model)
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    accelerator.wait_for_everyone()
    return relative_error(values(model), before)


@whole
def test_parameters_are_of_one_rank_alone_after_closing(workers, strategy, nodes):
    first, second = workers(2).run(write_after_closing, strategy, nodes=nodes)
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


def hand_over_with_the_optimizer(then: str) -> None:
    accelerator, model, optimizer, loader = start("lsdp")
    train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    LSHDPAccelerator(plan=plan_of(then, (1, 2))).prepare(model, optimizer, loader_of(0, 9))


@pytest.mark.parametrize("then", ["ddp", "lsdp"])
def test_an_optimizer_whose_state_is_divided_is_not_handed_over(workers, then):
    errors = workers(2).run(hand_over_with_the_optimizer, then, nodes=(2,), expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "state is divided among the ranks" in errors[0].message or "already stepped" in errors[0].message


def free_twice(strategy: str) -> dict:
    accelerator, model, optimizer, loader = start(strategy)
    train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    accelerator.free_memory()
    optimizer, model, loader = accelerator.prepare(optimizer.optimizer, model, loader)
    return train(accelerator, model, optimizer, loader)


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_what_was_freed_twice_is_prepared_again_in_any_order(workers, strategy, nodes):
    expected = plain([[0, 1, 2], [3, 4, 5], [6, 7, 8]] * 2)
    for parameters in workers(2).run(free_twice, strategy, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12


def go_on_after_free_memory(strategy: str) -> None:
    accelerator, model, optimizer, loader = start(strategy)
    train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    train(accelerator, model, optimizer, loader)


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_training_after_free_memory_is_refused(workers, strategy, nodes):
    errors = workers(2).run(go_on_after_free_memory, strategy, nodes=nodes, expect_failure=True)
    assert all("after accelerator.free_memory()" in error.message for error in errors)
