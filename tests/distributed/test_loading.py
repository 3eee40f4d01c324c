# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`load_state_dict` of a prepared model, or of a part of it, takes whole tensors under every strategy."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from test_unusual_scripts import CASE, plain, start, values
from torch import nn
from training_cases import collate, relative_error


PLACES = [("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (2,)), ("fsdp", (2,)), ("zero2", (2,))]
everywhere = pytest.mark.parametrize(("strategy", "nodes"), PLACES)


def train(accelerator, model, optimizer, loader) -> None:
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def load_after_training(strategy: str, what: str) -> tuple[dict, dict]:
    """Goes back to the weights of the beginning, and trains again; without momentum, so that nothing else remains."""
    accelerator, model, _, loader = start(strategy)
    accelerator._optimizers.clear()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    train(accelerator, model, optimizer, loader)
    first = values(model)
    model(collate([CASE.dataset(9, torch.float64)[0]])["pixel_values"])  # what it has gathered is of the past, too
    state = CASE.model().double().state_dict()
    if what == "in another module":
        outer = nn.ModuleDict({"inner": model})
        outer.load_state_dict({f"inner.{key}": value for key, value in state.items()})
    for name, part in {"whole": [("", model)], "parts": model.named_children()}.get(what, []):
        own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(name)}
        part.load_state_dict(own)
    train(accelerator, model, optimizer, loader)
    return first, values(model)


@everywhere
@pytest.mark.parametrize("what", ["whole", "parts", "in another module"])
def test_whole_tensors_are_loaded_on_all_ranks(workers, strategy, nodes, what):
    for first, second in workers(2).run(load_after_training, strategy, what, nodes=nodes):
        assert relative_error(second, first) <= 1e-12


def load_by_hooks(strategy: str, folder: str) -> tuple[dict, dict]:
    """As the example scripts of diffusers do."""
    accelerator, model, optimizer, loader = start(strategy)

    def save(models: list, weights: list, output: str) -> None:
        for state in weights:
            if accelerator.is_main_process:
                torch.save(state, os.path.join(output, "weights.pt"))
        weights.clear()

    def load(models: list, source: str) -> None:
        models.pop().load_state_dict(torch.load(os.path.join(source, "weights.pt")))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    saved = values(model)
    train(accelerator, model, optimizer, loader)
    accelerator.load_state(folder)
    return saved, values(model)


@pytest.mark.parametrize(("strategy", "nodes"), [("lsdp", (2,)), ("collectives", (2,)), ("fsdp", (2,))])
def test_hooks_of_a_script_load_whole_tensors(workers, tmp_path, strategy, nodes):
    for saved, loaded in workers(2).run(load_by_hooks, strategy, str(tmp_path / "state"), nodes=nodes):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def load_what_one_rank_has(strategy: str, in_another: bool) -> None:
    accelerator, model, *_ = start(strategy)
    state = accelerator.get_state_dict(model)
    if in_another:
        state = {f"inner.{name}": value for name, value in state.items()}
        model = nn.ModuleDict({"inner": model})
    model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("in_another", [False, True])
@pytest.mark.parametrize("strategy", ["collectives", "fsdp"])
def test_a_state_that_one_rank_has_is_refused_on_all_ranks(workers, strategy, in_another):
    errors = workers(2).run(load_what_one_rank_has, strategy, in_another, nodes=(2,), expect_failure=True)
    assert len({error.message for error in errors}) == 1 and "with other tensors on some ranks" in errors[0].message


def load_into_copies(strategy: str) -> dict:
    """Ranks may do with a copy of their own, or of a part, whatever they like."""
    accelerator, model, optimizer, loader = start(strategy)
    if accelerator.process_index == 0:
        for part in (model, next(model.children())):
            copied = copy.deepcopy(part)
            copied.load_state_dict({name: value * 0 for name, value in copied.state_dict().items()})
            assert "__reduce_ex__" not in vars(copied)
    train(accelerator, model, optimizer, loader)
    return values(model)


def test_copies_are_loaded_by_one_rank_alone(workers):
    for parameters in workers(2).run(load_into_copies, "lsdp", nodes=(2,)):
        assert relative_error(parameters, plain()) <= 1e-12
