# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Prepared models beside each other, and what scripts do with a prepared model: exact, or a clear error everywhere."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
import weakref

import node_shared_cases
import pytest
import torch
from test_unusual_scripts import CASE, plain, plan_of, start, values
from torch import nn
from training_cases import relative_error

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.engine.module_state import is_noop_conversion
from accelerate_lshdp.engine.prepared import PreparedModel


#: Where the parameters are whole, shared by the ranks of a node, or sharded over a node and over the world.
PLACES = [("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (2,)), ("fsdp", (2,))]
everywhere = pytest.mark.parametrize(("strategy", "nodes"), PLACES)


# Parameters of two prepared models


class Head(nn.Module):
    """A layer on top of a body that others may have, too."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.last = nn.Linear(4, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(values)).mean()


def sharing(how: str) -> tuple[nn.Module, nn.Module]:
    body = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    first, second = Head(body).double(), Head(body).double()
    if how == "part first":
        return body, first
    if how == "part last":
        return first, body
    if how == "tied":
        second = nn.Linear(4, 4).double()
        second.weight = body[0].weight
    return first, second


def prepare_shared(strategy: str) -> list[str]:
    messages = []
    for how in ("common part", "part first", "part last", "tied"):
        accelerator = LSHDPAccelerator(plan=plan_of(strategy))
        first, second = sharing(how)
        accelerator.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
        with pytest.raises(RuntimeError) as error:
            accelerator.prepare(second)
        messages.append(str(error.value))
    return messages


@everywhere
def test_parameters_of_two_prepared_models_are_refused_on_all_ranks(workers, strategy, nodes):
    for messages in workers(2).run(prepare_shared, strategy, nodes=nodes):
        assert all("that was prepared before" in message and "ranks 0, 1" in message for message in messages)


def train_beside_frozen_part() -> list[float]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    torch.manual_seed(0)
    body = nn.Linear(4, 4).double().requires_grad_(False)
    heads = accelerator.prepare(Head(body).double(), Head(body).double())
    values = torch.full((2, 4), accelerator.process_index + 1.0, dtype=torch.float64)
    accelerator.backward(heads[0](values) + heads[1](values))
    expected = torch.stack([body(torch.full((4,), rank + 1.0, dtype=torch.float64)) for rank in (0, 1)]).mean(0)
    return [float((head.last.weight.grad - expected).abs().max()) for head in heads]


def test_frozen_parameters_of_two_models_are_shared(workers):
    for errors in workers(2).run(train_beside_frozen_part, nodes=(1, 1)):
        assert max(errors) <= 1e-12


# Loading a state where ranks share the parameters


def evaluate_other_weights(late: str) -> list[bool]:
    """Loads other weights, evaluates, puts the old ones back and evaluates. Rank 1 is late in one of these."""
    accelerator, model, *_ = node_shared_cases.start()
    inputs = node_shared_cases.batch_of(0, 2)["inputs"]
    other = {name: value * 0.5 for name, value in model.state_dict().items()}
    expected = []
    for state in (other, model.state_dict()):
        alone = node_shared_cases.TwoHeads().double()
        alone.load_state_dict(state)
        expected.append(alone(inputs))
    rank = accelerator.process_index
    seen = []
    accelerator.wait_for_everyone()
    time.sleep(0.3 * rank if late == "keeping" else 0)
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(other)
    time.sleep(0.6 * rank if late == "evaluating" else 0)
    with torch.no_grad():
        seen.append(model(inputs))
    time.sleep(0.3 + 0.3 * (1 - rank))  # or it would all be over before the other one begins
    model.load_state_dict(kept)
    with torch.no_grad():
        seen.append(model(inputs))
    return [torch.equal(*pair) for pair in zip(seen, expected, strict=True)]


@pytest.mark.parametrize("late", ["keeping", "evaluating"])
def test_weights_that_are_loaded_for_an_evaluation_are_those_of_all_ranks(workers, late):
    assert workers(2).run(evaluate_other_weights, late, nodes=(2,)) == [[True, True]] * 2


def load_on_rank_0(instead: str) -> None:
    accelerator, model, optimizer, loader = node_shared_cases.start()
    accelerator.backward(model(**next(iter(loader))))
    if accelerator.process_index == 0:
        try:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        finally:
            if instead == "wait":
                accelerator.wait_for_everyone()  # lets rank 1 go, as the end of this process would
            if instead == "pass":
                next(iter(loader))
    elif instead == "pass":
        next(iter(loader))
    elif instead == "backward":
        accelerator.backward(model(**node_shared_cases.batch_of(0, 1)))
    elif instead == "step":
        optimizer.step()
    else:
        accelerator.wait_for_everyone()


@pytest.mark.parametrize(
    ("instead", "first", "second"),
    [
        ("backward", "has gone on to its next backward", "has come to load_state_dict"),
        ("step", "local rank 0 to load_state_dict, local rank 1 to the optimizer's step", "do different things"),
        ("wait", "has gone on to its next gather, wait_for_everyone", None),
        ("pass", "has gone on to its next gather, wait_for_everyone", None),
    ],
)
def test_a_state_that_one_rank_loads_is_an_error_and_no_hang(workers, instead, first, second):
    errors = workers(2).run(load_on_rank_0, instead, nodes=(2,), expect_failure=True)
    assert first in errors[0].message
    assert errors[1] is None if second is None else second in errors[1].message


# Moving, converting, pickling and copying


def train_and_convert(strategy: str) -> tuple[dict, list[str]]:
    accelerator, model, optimizer, loader = start(strategy)
    model.train()
    for batch in loader:
        model.to(accelerator.device)
        accelerator.backward(CASE.loss(model, batch))
        assert model.cpu().double() is model
        optimizer.step()
        model.to(accelerator.device, torch.float64)
        optimizer.zero_grad()
    before = values(model)
    messages = []
    try:
        for batch in loader:
            model.float()
            accelerator.backward(CASE.loss(model, {**batch, "pixel_values": batch["pixel_values"].float()}))
    except RuntimeError as error:
        messages.append(str(error))
    return before, messages


@everywhere
def test_conversions_that_change_nothing_are_harmless_and_others_refused(workers, strategy, nodes):
    for parameters, messages in workers(2).run(train_and_convert, strategy, nodes=nodes):
        assert relative_error(parameters, plain()) <= 1e-12
        assert len(messages) == 1 and "before prepare()" in messages[0]


def test_a_conversion_of_an_offloaded_model_to_its_device_is_left_out():
    model = nn.Linear(2, 2)
    device = torch.device("meta")  # any other than that of the parameters
    assert is_noop_conversion(lambda tensor: tensor.to(device), model, device)
    assert is_noop_conversion(lambda tensor: tensor.cpu(), model, device)
    assert not is_noop_conversion(lambda tensor: tensor.half(), model, device)
    assert not is_noop_conversion(lambda tensor: tensor.to(device), model, torch.device("cpu"))
    assert not is_noop_conversion(lambda tensor: tensor.to(memory_format=torch.channels_last), model, device)


def copy_prepared(strategy: str) -> tuple[bool, list[str]]:
    accelerator, model, optimizer, loader = start(strategy)
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()
    model = accelerator.unwrap_model(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    torch.save(optimizer.optimizer, io.BytesIO())
    pickled = pickle.dumps(model)
    copies = [pickle.loads(pickled), torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)]
    copies.append(copy.deepcopy(model))
    equal = all(torch.equal(CASE.loss(each, batch), CASE.loss(model, batch)) for each in copies)
    for each in copies:  # a model of its own
        next(each.parameters()).data.zero_()
        CASE.loss(each, batch).backward()
    equal = equal and float(next(model.parameters()).abs().sum()) > 0
    texts = [pickled, buffer.getvalue(), repr(vars(copies[2])).encode()]
    return equal, [text.count(b"accelerate_lshdp") for text in texts]


@pytest.mark.parametrize(("strategy", "nodes"), PLACES[:2])
def test_pickles_and_copies_of_a_prepared_model_are_of_the_users_module_alone(workers, strategy, nodes):
    assert workers(2).run(copy_prepared, strategy, nodes=nodes) == [(True, [0, 0, 0])] * 2


def save_shards(strategy: str) -> list[str]:
    """What is said where a script saves the states of a sharded model and of its optimizer, each by each rank."""
    accelerator, model, optimizer, loader = start(strategy)
    for batch in loader:
        accelerator.backward(CASE.loss(model.train(), batch))
        optimizer.step()
    said = []
    part = next(module for module in model.modules() if any(True for _ in module.parameters(recurse=False)))
    for state in (model.state_dict(), part.state_dict(), copy.deepcopy(model.state_dict()), optimizer.state_dict()):
        with pytest.raises(RuntimeError) as error:
            torch.save(state, io.BytesIO())
        said.append(str(error.value))
    # In this process they are of use as before, and whole ones are saved.
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.save(accelerator.get_state_dict(model), io.BytesIO())
    torch.save(dict(model.named_buffers()), io.BytesIO())
    return said


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_shards_are_not_saved_as_if_they_were_whole(workers, strategy):
    """A file of the main process had its own shards alone, and nothing said so."""
    for said in workers(2).run(save_shards, strategy, nodes=(1, 1)):
        assert all("found a shard" in text and "get_state_dict" in text for text in said)


class OwnCopy(nn.Module):
    """Copies itself, as some models do: with all attributes that it has."""

    def __init__(self, notes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.notes = notes

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values).mean()

    def __deepcopy__(self, memo: dict) -> OwnCopy:
        new = type(self).__new__(type(self))
        if self.notes:
            memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


def convert_own_copy() -> list[torch.dtype]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    model = accelerator.prepare(OwnCopy(notes=True))
    copied = copy.deepcopy(model).half()
    again = pickle.loads(pickle.dumps(copied))
    unnoted = copy.deepcopy(accelerator.prepare(OwnCopy(notes=False)))
    with pytest.raises(RuntimeError, match="__deepcopy__ of its own class"):
        unnoted.half()
    assert PreparedModel.of(copied) is PreparedModel.of(again) is None
    return [each.layer.weight.dtype for each in (model, copied, again)]


def test_a_copy_that_a_class_makes_itself_is_converted_alone(workers):
    """It took along the conversion of the prepared model, which converted that."""
    assert workers(2).run(convert_own_copy, nodes=(1, 1)) == [[torch.float32, torch.float16, torch.float16]] * 2


def numbers_of_hooks() -> list[str]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp"))
    model = nn.Linear(2, 2)
    own = model.register_forward_hook(lambda module, args, kwargs, output: output, with_kwargs=True)
    accelerator.prepare(model)
    copied = copy.deepcopy(model)
    kept = [(name, key) for name, value in vars(copied).items() if "_hooks" in name and value for key in value]
    return [name for name, key in kept if key != own.id]


def test_pickles_and_copies_keep_no_numbers_of_hooks_that_they_leave_out(workers):
    """Where a pickle is read, another hook may have that number."""
    assert workers(2).run(numbers_of_hooks, nodes=(1, 1)) == [[], []]


def share_memory(strategy: str) -> list[bool]:
    accelerator = LSHDPAccelerator(plan=plan_of(strategy))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        model.share_memory()
        accelerator.backward(model(torch.randn(3, 2)).mean())
        optimizer.step()
    return [tensor.is_shared() for tensor in (*model.parameters(), *model.buffers())]


def test_memory_is_shared_with_other_processes_when_a_script_asks_for_it(workers):
    for shared in workers(2).run(share_memory, "ddp", nodes=(1, 1)):
        assert all(shared)


def drop_accelerator(strategy: str) -> list[bool]:
    accelerator, model, optimizer, loader = start(strategy)
    for batch in loader:
        accelerator.backward(CASE.loss(model.train(), batch))
        optimizer.step()
    references = [weakref.ref(accelerator), weakref.ref(optimizer), weakref.ref(loader)]
    gc.collect()
    gc.disable()
    try:
        del accelerator, batch
        freed = [references[0]() is None]
        del optimizer, loader
        return freed + [reference() is None for reference in references[1:]]
    finally:
        gc.enable()


@everywhere
def test_an_accelerator_is_freed_when_it_is_dropped(workers, strategy, nodes):
    assert workers(2).run(drop_accelerator, strategy, nodes=nodes) == [[True, True, True]] * 2
