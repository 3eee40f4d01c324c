# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients between backward and step are in no checkpoint: saving then is refused, and only then.

Gradients that no step will use do not stand in the way, dropped ones are gone under every strategy.
"""

from __future__ import annotations

import pytest
import torch
from exactness import full
from test_unusual_scripts import CASE, plan_of, start, values
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset
from training_cases import relative_error

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.accelerator.unstepped_gradients import UnsteppedGradients
from accelerate_lshdp.engine.prepared import PreparedModel


shared = pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])


def network(inputs: int = 4, outputs: int = 1, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def points() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(12, 4, generator=generator, dtype=torch.float64)), batch_size=2)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


# Several models and optimizers


def train_gan(strategy: str, folder: str) -> int:
    """In the order of DCGAN: the discriminator keeps what the generator's loss has given it, until its own turn."""
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    made, judge = network(4, 4, 1), network(4, 1, 2)
    made, judge, step_made, step_judge, loader = accelerator.prepare(made, judge, adam(made), adam(judge), points())
    for number, (real,) in enumerate(loader):
        step_judge.zero_grad()
        accelerator.backward(softplus(-judge(real)).mean() + softplus(judge(made(real.flip(0)).detach())).mean())
        step_judge.step()
        step_made.zero_grad()
        accelerator.backward(softplus(-judge(made(real.flip(0)))).mean())
        step_made.step()
        accelerator.save_state(f"{folder}/{number}")
    return accelerator.completed_steps


@shared
def test_gradients_that_are_dropped_before_their_step_do_not_stand_in_the_way_of_saving(
    workers, tmp_path, strategy, nodes
):
    assert workers(2).run(train_gan, strategy, str(tmp_path), nodes=nodes) == [3, 3]


def train_with_a_model_that_is_not_stepped(strategy: str, folder: str) -> None:
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    model, features = network(4, 4, 1), network(4, 3, 2)
    model, features, optimizer, loader = accelerator.prepare(model, features, adam(model), points())
    for number, (inputs,) in enumerate(loader):
        accelerator.backward((features(model(inputs)) - features(inputs).detach()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(f"{folder}/{number}")


@shared
def test_a_model_that_no_optimizer_updates_does_not_stand_in_the_way_of_saving(workers, tmp_path, strategy, nodes):
    workers(2).run(train_with_a_model_that_is_not_stepped, strategy, str(tmp_path), nodes=nodes)


class AskedModel:
    """Says that it holds gradients, and how often it was asked: on a GPU every answer waits for the device."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.asked = 0

    def trainable_parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def holds_gradients(self, among: object = None) -> bool:
        self.asked += 1
        return True


def test_after_a_save_only_models_that_an_optimizer_updates_are_asked_for_gradients():
    stepped, left_over, features = (AskedModel(network()) for _ in range(3))
    optimizers = [adam(stepped.module), adam(left_over.module)]
    gradients = UnsteppedGradients()
    gradients.produced([stepped, left_over, features])
    gradients.step_ended(optimizers[0])
    gradients.saved(optimizers)
    for _ in range(3):
        gradients.backward_begins()
    assert (left_over.asked, features.asked) == (3, 0)
    assert gradients.takes_lost(optimizers[1])


def save_between_two_optimizers(strategy: str, folder: str, parts_of: str) -> None:
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    if parts_of == "one model":
        model = network()
        first, second = adam(model[0]), adam(model[2])
        model, first, second, loader = accelerator.prepare(model, first, second, points())
    else:
        inner, outer = network(4, 4, 1), network(4, 1, 2)
        inner, outer, first, second, loader = accelerator.prepare(inner, outer, adam(inner), adam(outer), points())
        model = lambda inputs: outer(inner(inputs))  # noqa: E731
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        first.step()
        accelerator.save_state(folder)
        second.step()


@shared
@pytest.mark.parametrize(
    ("parts_of", "message"),
    [("one model", "save_state was called between backward and"), ("one loss", "the checkpoint lacks them")],
)
def test_saving_between_the_steps_of_two_optimizers_is_an_error(workers, tmp_path, strategy, nodes, parts_of, message):
    folder = str(tmp_path / "state")
    errors = workers(2).run(save_between_two_optimizers, strategy, folder, parts_of, nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1 and message in errors[0].message


def train_with_gradients_left_over(strategy: str, folder: str) -> None:
    """The generator's loss adds to what the discriminator is stepped with next: the checkpoint has no part of that."""
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    made, judge = network(4, 4, 1), network(4, 1, 2)
    made, judge, step_made, step_judge, loader = accelerator.prepare(made, judge, adam(made), adam(judge), points())
    for (real,) in loader:
        accelerator.backward(softplus(-judge(real)).mean())
        step_judge.step()
        step_judge.zero_grad()
        accelerator.backward(softplus(-judge(made(real))).mean())
        step_made.step()
        accelerator.save_state(folder)


def test_gradients_left_over_that_are_stepped_with_after_a_save_are_an_error(workers, tmp_path):
    folder = str(tmp_path / "state")
    errors = workers(2).run(train_with_gradients_left_over, "lsdp", folder, nodes=(2,), expect_failure=True)
    assert len({error.message for error in errors}) == 1 and "the checkpoint lacks them" in errors[0].message


# Steps that fp16 skips


def overflow(folder: str) -> list[bool]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)  # as with fp16, which needs CUDA
    model = network()
    model, optimizer, loader = accelerator.prepare(model, adam(model), points())
    skipped = []
    for number, (inputs,) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean() * (float("inf") if number == 1 else 1.0))
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        accelerator.save_state(f"{folder}/{number}")
    return skipped


def test_a_step_that_overflows_does_not_stand_in_the_way_of_saving(workers, tmp_path):
    assert workers(2).run(overflow, str(tmp_path), nodes=(1, 1)) == [[False, True, False]] * 2


# Dropping gradients of a loop that was left in the middle of a step

LEFT = [("ddp", (1, 1)), ("lsdp", (2,)), ("lsdp", (1, 1)), ("collectives", (1, 1)), ("collectives", (2,))]
LEFT += [("fsdp", (2,)), ("zero2", (2,))]
RATE = 0.1


def start_with_sgd(strategy: str) -> tuple:
    accelerator, model, _, loader = start(strategy, gradient_accumulation_steps=2)
    accelerator._optimizers.clear()
    return accelerator, model, accelerator.prepare(torch.optim.SGD(model.parameters(), RATE)), loader


def accumulate(accelerator, model, optimizer, loader, micro_batches: int) -> None:
    model.train()
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(CASE.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if number == micro_batches:
            break


def one_step(accelerator, model, optimizer, loader) -> tuple[dict, dict]:
    """The parameters before and after the next step."""
    before = values(model)
    accumulate(accelerator, model, optimizer, loader, 2)
    return before, values(model)


def leave_and_drop(strategy: str, how: str, folder: str) -> tuple[dict, dict]:
    accelerator, model, optimizer, loader = training = start_with_sgd(strategy)
    if how == "load":
        accelerator.save_state(folder)
    accumulate(*training, 1)
    if how == "load":
        accelerator.load_state(folder)
    else:
        model.zero_grad(set_to_none=how == "none")
        accelerator.save_state(folder)
    return one_step(*training)


def gradient(before: dict, after: dict) -> dict:
    return {name: (before[name] - after[name]) / RATE for name in before}


@pytest.mark.parametrize("how", ["none", "load"])
@pytest.mark.parametrize(("strategy", "nodes"), LEFT)
def test_gradients_of_a_loop_left_inside_a_window_can_be_dropped(workers, tmp_path, strategy, nodes, how):
    for before, after in workers(2).run(leave_and_drop, strategy, how, str(tmp_path / "state"), nodes=nodes):
        model = CASE.model().double()
        model.load_state_dict({**model.state_dict(), **before})
        data = CASE.dataset(9, torch.float64)
        for indices in ([0, 1, 2], [3, 4, 5]):
            batch = {name: torch.stack([data[i][name] for i in indices]) for name in data[0]}
            (CASE.loss(model, batch) / 2).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert relative_error(gradient(before, after), expected) <= 1e-9


def drop_by_the_optimizer(strategy: str) -> tuple[dict, dict]:
    """Outside of `accumulate` the optimizer's `zero_grad` works, whatever waits to be summed."""
    accelerator, model, optimizer, loader = start(strategy)
    model.train()
    batches = list(loader)
    with model.no_sync():
        accelerator.backward(CASE.loss(model, batches[0]))
    optimizer.zero_grad()
    accelerator.backward(CASE.loss(model, batches[1]))
    found = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    optimizer.zero_grad()
    accelerator.backward(CASE.loss(model, batches[1]))
    return found, {name: full(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (2,)), ("fsdp", (2,))]
)
def test_what_the_optimizer_drops_is_not_summed_later(workers, strategy, nodes):
    for found, expected in workers(2).run(drop_by_the_optimizer, strategy, nodes=nodes):
        assert relative_error(found, expected) <= 1e-12


def drop_by_two_optimizers() -> None:
    accelerator, model, optimizer, loader = start("fsdp")
    model.train()
    half = [[p for n, p in enumerate(model.parameters()) if n % 2 == k] for k in (0, 1)]
    accelerator._optimizers.clear()
    first, second = accelerator.prepare(*(torch.optim.SGD(parameters, RATE) for parameters in half))
    batches = list(loader)
    with model.no_sync():
        accelerator.backward(CASE.loss(model, batches[0]))
    first.zero_grad()
    prepared = PreparedModel.of(model)
    assert prepared.local.held and prepared.holds_gradients()
    assert not prepared.holds_gradients({id(p) for p in half[0]})
    second.zero_grad()
    assert not prepared.local.held and not prepared.holds_gradients()


def test_each_optimizer_drops_the_gradients_of_its_parameters(workers):
    workers(2).run(drop_by_two_optimizers, nodes=(2,))
