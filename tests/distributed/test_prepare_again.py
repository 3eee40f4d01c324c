# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Scripts prepare more while they train, and the same once more after ``free_memory``: as in plain Accelerate."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from test_unusual_scripts import CASE, loader_of, plain, plan_of, start, values
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
    return parameters, accelerator.completed_steps, accelerator.session.rank_step.optimizer_steps


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


def train_stages_with_one_optimizer(given: str, kept: bool) -> tuple[dict, list[tuple[int, int]], int]:
    """Three global batches, each by an accelerator of its own, as in a cell of a notebook that is run three times."""
    model = CASE.model().double()
    optimizer = raw = make_optimizer(model, 1e-2, 0.0)
    stages, steps = [], []
    for batch in range(3):
        accelerator = LSHDPAccelerator(plan=plan_of("ddp", (2, 1)))
        model, prepared, loader = accelerator.prepare(model, optimizer, loader_of(3 * batch, 3 * batch + 3))
        train(accelerator, model, prepared, loader)
        assert accelerator._optimizers == [prepared] and prepared.optimizer is raw
        stages += [accelerator] if kept else []
        steps.append((accelerator.completed_steps, accelerator.session.rank_step.optimizer_steps))
        optimizer = prepared if given == "prepared" else raw
    return values(model), steps, len(raw._optimizer_step_pre_hooks) + len(raw._optimizer_step_post_hooks)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("given", ["raw", "prepared"])
def test_an_optimizer_goes_from_one_accelerator_to_the_next(workers, given, kept):
    expected = plain()
    for parameters, steps, hooks in workers(2).run(train_stages_with_one_optimizer, given, kept, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12
        assert (steps, hooks) == ([(1, 1)] * 3, 2)


def step_with_the_accelerator_before() -> None:
    model = CASE.model().double()
    raw = make_optimizer(model, 1e-2, 0.0)
    stages = []
    for _ in range(2):
        accelerator = LSHDPAccelerator(plan=plan_of("ddp", (2, 1)))
        stages.append((accelerator, *accelerator.prepare(model, raw, loader_of(0, 3))))
    train(*stages[0])


def test_an_accelerator_whose_model_and_optimizer_another_one_has_prepared_trains_no_more(workers):
    errors = workers(2).run(step_with_the_accelerator_before, nodes=(1, 1), expect_failure=True)
    assert all("another accelerator has prepared" in error.message for error in errors)


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
