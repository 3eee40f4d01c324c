# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Scripts prepare more while they train, and the same once more after ``free_memory``: as in plain Accelerate."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from test_unusual_scripts import CASE, plain, plan_of, start, values
from training_cases import make_optimizer, relative_error

from accelerate_lshdp import LSHDPAccelerator


everywhere = pytest.mark.parametrize(
    ("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (2,)), ("fsdp", (2,))]
)


def train(accelerator, model, optimizer, loader) -> dict:
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def train_in_two_stages(strategy: str) -> list[dict]:
    accelerator, model, optimizer, loader = start(strategy)
    trained = [train(accelerator, model, optimizer, loader)]
    second = CASE.model().double()
    second, optimizer = accelerator.prepare(second, make_optimizer(second, 1e-2, 0.0))
    return [*trained, train(accelerator, second, optimizer, loader)]


@everywhere
def test_a_model_may_be_prepared_after_another_one_was_trained(workers, strategy, nodes):
    expected = plain()
    for trained in workers(2).run(train_in_two_stages, strategy, nodes=nodes):
        assert all(relative_error(parameters, expected) <= 1e-12 for parameters in trained)


def train_and_prepare_again(strategy: str) -> tuple[dict, int, int]:
    """An optimizer that was made once is prepared anew, as with `find_executable_batch_size`."""
    accelerator, model, optimizer, loader = start(strategy)
    raw = optimizer.optimizer
    train(accelerator, model, optimizer, loader)
    accelerator.free_memory()
    model, optimizer, loader = accelerator.prepare(model, raw, loader)
    parameters = train(accelerator, model, optimizer, loader)
    return parameters, accelerator.completed_steps, accelerator._rank_step.optimizer_steps


@everywhere
def test_what_was_freed_may_be_prepared_again_and_steps_count_once(workers, strategy, nodes):
    expected = plain([[0, 1, 2], [3, 4, 5], [6, 7, 8]] * 2)
    for parameters, completed, counted in workers(2).run(train_and_prepare_again, strategy, nodes=nodes):
        assert (completed, counted) == (6, 6)
        assert relative_error(parameters, expected) <= 1e-12


def find_batch_size() -> tuple[int, int]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    model = CASE.model().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    tried = []

    @find_executable_batch_size(starting_batch_size=4)
    def attempt(batch_size: int) -> None:
        accelerator.free_memory()
        tried.append(accelerator.prepare(model, optimizer))
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory.")

    attempt()
    prepared, stepped = tried[-1]
    accelerator.backward(sum(parameter.sum() for parameter in prepared.parameters()))
    stepped.step()
    return len(tried), accelerator.completed_steps


def test_batch_sizes_that_were_tried_are_no_steps(workers):
    assert workers(1).run(find_batch_size) == [(3, 1)]


def prepare_an_optimizer_that_one_rank_has_stepped() -> None:
    accelerator, model, *_ = start("lsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    if accelerator.process_index == 1:
        for parameter in model.parameters():
            optimizer.state[parameter] = {"step": torch.tensor(1.0)}
    accelerator.prepare(optimizer)


def test_an_optimizer_that_one_rank_has_stepped_is_refused_on_all_ranks(workers):
    errors = workers(2).run(prepare_an_optimizer_that_one_rank_has_stepped, nodes=(2,), expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "rank 1: ValueError: the optimizer has already stepped" in errors[0].message
