# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Models and optimizers that FSDP2 itself does not take: exact under every placement, or refused with what to do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from exactness import full
from test_unusual_scripts import plan_of
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset
from training_cases import collate, relative_error, tiny_gpt2

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.shim import script


SHARDED = [("collectives", (2,)), ("collectives", (1, 1)), ("fsdp", (2,)), ("zero2", (2,))]
OTHERS = [("ddp", (1, 1)), ("lsdp", (2,))]


class Points(Dataset):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.sin(torch.arange(4, dtype=torch.float64) * (1 + index) + index)}


class Odd(nn.Module):
    """With numbers and empty tensors as parameters, in a unit and outside of all units, in use or not."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 3)])
        self.plain = plain
        if not plain:
            self.layers[1].factor = nn.Parameter(torch.tensor(0.8))
            self.layers[2].nothing = nn.Parameter(torch.zeros(0, 3))
            self.logit_scale = nn.Parameter(torch.tensor(1.3))
            self.unused = nn.Parameter(torch.tensor(2.0))
            self.frozen = nn.Parameter(torch.tensor(0.7), requires_grad=False)
            self.empty = nn.Parameter(torch.zeros(0))
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = torch.tanh(self.layers[0](inputs))
        values = torch.tanh(self.layers[1](values))
        if not self.plain:
            values = values * self.layers[1].factor
        values = self.layers[2](values)
        return values if self.plain else values * self.logit_scale.exp() * self.frozen


def loss_of(model: nn.Module, batch: dict) -> torch.Tensor:
    return model(batch["inputs"]).square().mean()


def prepare(strategy: str, model: nn.Module, make: Callable, sizes: tuple = (2, 1)) -> tuple:
    accelerator = LSHDPAccelerator(plan=plan_of(strategy, sizes))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    loader = DataLoader(Points(), batch_size=2, collate_fn=collate)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


# Parameters that cannot be cut


def adamw(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, weight_decay=0.1)


def train_odd(strategy: str, folder: str) -> tuple[dict, dict, bool]:
    accelerator, model, optimizer, loader = prepare(strategy, Odd(), adamw, ((2, 2), (1, 2)))
    model.train()
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            if step % 2 == 0:
                accelerator.backward(loss)
            else:  # two synchronised backwards of one forward: what is final must not be summed again
                accelerator.backward(0.25 * loss, retain_graph=strategy == "ddp")
                if strategy != "ddp":
                    loss = loss_of(model, batch)
                accelerator.backward(0.75 * loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    trained = values(model)
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in (model.logit_scale, model.layers[1].factor):
            parameter.data.zero_()
    accelerator.load_state(folder)
    whole = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    loaded = values(model)
    return trained, whole, all(torch.equal(loaded[name], value) for name, value in trained.items())


@pytest.mark.parametrize(("strategy", "nodes"), [*SHARDED, OTHERS[0]])
def test_parameters_without_dimension_or_elements_are_trained_and_saved(workers, tmp_path, strategy, nodes):
    model = Odd()
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    for begin in range(0, 18, 6):
        loss_of(model, collate([Points()[index] for index in range(begin, begin + 6)])).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    ranks = workers(2).run(train_odd, strategy, str(tmp_path / "state"), nodes=nodes)
    for parameters, _, is_loaded in ranks:
        assert relative_error(parameters, expected) <= 1e-12 and is_loaded
    assert relative_error(ranks[0][1], expected) <= 1e-12


# Optimizers


def lbfgs(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, 0.5, max_iter=3, line_search_fn="strong_wolfe")


def muon(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], 0.05)


OPTIMIZERS = {"lbfgs": lbfgs, "muon": muon, "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1)}


def train_with(backward: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        backward(loss)
        return loss.detach()

    # Muon's own arithmetic is in bfloat16, where an order of summation shows: only the rest can be compared.
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        optimizer.step(closure)


def train_each(strategy: str, names: tuple[str, ...]) -> dict[str, dict]:
    trained = {}
    for name in names:
        accelerator, model, optimizer, loader = prepare(strategy, Odd(plain=True), OPTIMIZERS[name])
        for batch in loader:
            train_with(accelerator.backward, model.train(), optimizer, batch)
        trained[name] = values(model)
    return trained


@pytest.mark.parametrize(
    ("strategy", "nodes", "names"),
    [
        ("ddp", (1, 1), ("lbfgs",)),
        ("collectives", (1, 1), ("lbfgs", "adagrad")),
        ("collectives", (2,), ("muon", "adagrad")),
        ("fsdp", (2,), ("muon", "adagrad")),
    ],
)
def test_optimizers_that_see_shards_or_losses_step_as_in_one_process(workers, strategy, nodes, names):
    ranks = workers(2).run(train_each, strategy, names, nodes=nodes)
    for name in names:
        model = Odd(plain=True)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        for begin in range(0, 18, 3):
            batch = collate([Points()[index] for index in range(begin, begin + 3)])
            train_with(torch.Tensor.backward, model, optimizer, batch)
        expected = dict(model.named_parameters())
        assert all(relative_error(trained[name], expected) <= 1e-12 for trained in ranks)


# What is refused


def refused(strategy: str, folder: str) -> dict[str, str]:
    from transformers import Adafactor

    messages = {}

    def note(name: str, call: Callable) -> None:
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        messages[name] = str(error.value)

    makers = {
        "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
        "Adafactor of transformers": lambda parameters: Adafactor(parameters),
        "Rprop": torch.optim.Rprop,
        "LBFGS": torch.optim.LBFGS,
    }
    for name, make in makers.items():
        note(name, lambda make=make: prepare(strategy, Odd(plain=True), make))
    accelerator, model, *_ = prepare(strategy, Odd(plain=True), torch.optim.SGD)
    inputs = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    note("create_graph", lambda: torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True))
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    model = accelerator.prepare(tiny_gpt2())
    note("deepcopy", lambda: copy.deepcopy(model))
    note("AveragedModel", lambda: AveragedModel(model))
    note("save_pretrained", lambda: model.save_pretrained(folder))
    note("pickle", lambda: torch.save(model, io.BytesIO()))
    return messages


def save_whole(strategy: str, folder: str) -> None:
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    model = accelerator.prepare(tiny_gpt2())
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)


@pytest.mark.parametrize(("strategy", "nodes"), [("collectives", (2,)), ("fsdp", (2,))])
def test_what_needs_whole_parameters_is_refused_where_they_are_sharded(workers, tmp_path, strategy, nodes):
    from transformers import GPT2LMHeadModel

    for messages in workers(2).run(refused, strategy, str(tmp_path / "refused"), nodes=nodes):
        for name in ("Adafactor", "Adafactor of transformers", "Rprop", "LBFGS"):
            assert "needs whole parameters" in messages[name]
        assert "gradients of gradients" in messages["create_graph"]
        assert "get_state_dict" in messages["deepcopy"] and messages["AveragedModel"] == messages["deepcopy"]
        assert "save_pretrained(..., state_dict=state)" in messages["save_pretrained"]
        assert "save_model" in messages["pickle"]
    workers(2).run(save_whole, strategy, str(tmp_path), nodes=nodes)
    loaded = dict(GPT2LMHeadModel.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in tiny_gpt2().named_parameters())


def prepare_sparse(strategy: str) -> None:
    LSHDPAccelerator(plan=plan_of(strategy)).prepare(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)))


@pytest.mark.parametrize(("strategy", "nodes"), [*OTHERS, SHARDED[0]])
def test_sparse_gradients_are_refused_on_all_ranks(workers, strategy, nodes):
    errors = workers(2).run(prepare_sparse, strategy, nodes=nodes, expect_failure=True)
    assert all("sparse=True in 0 (Embedding)" in error.message for error in errors)


def penalty(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """How far the slope of a critic is from 1."""
    inputs = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def train_critic(strategy: str) -> list[float]:
    accelerator, model, _, loader = prepare(strategy, Odd(plain=True), torch.optim.SGD, (1, 1))
    average = AveragedModel(model)
    errors = []
    for number, batch in enumerate(loader):
        accelerator.backward(penalty(model, batch["inputs"]))
        whole = collate([Points()[2 * number + rank] for rank in (0, 1)])
        penalty(average.module, whole["inputs"]).backward()
        pairs = zip(model.parameters(), average.module.parameters(), strict=True)
        errors += [float((a.grad - b.grad).abs().max()) for a, b in pairs if b.grad is not None]
        model.zero_grad()
        average.zero_grad()
    return errors


@pytest.mark.parametrize(("strategy", "nodes"), OTHERS)
def test_gradients_of_gradients_and_averaged_models_where_parameters_are_whole(workers, strategy, nodes):
    for errors in workers(2).run(train_critic, strategy, nodes=nodes):
        assert max(errors) <= 1e-12


def average_by_hand(strategy: str) -> None:
    _, model, _, _ = prepare(strategy, Odd(plain=True), torch.optim.SGD, (1, 1))
    for average, parameter in zip(Odd(plain=True).parameters(), model.parameters(), strict=True):
        average.data.lerp_(parameter.data, 0.1)


@pytest.mark.parametrize(("strategy", "nodes"), [("fsdp", (2,)), ("zero2", (2,))])
def test_averages_of_shards_are_refused_by_torch(workers, strategy, nodes):
    """In the words behind which the shim says what to do."""
    errors = workers(2).run(average_by_hand, strategy, nodes=nodes, expect_failure=True)
    assert all(script._MIXED_TENSORS in error.message for error in errors)
