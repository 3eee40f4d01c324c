# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What is restored and what is refused, in one process: every refusal says why and leaves the run as it was."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from checkpoint_cases import CPU, assert_same, full_state, objects, one_process, visible
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accelerate_lshdp.checkpoint.folder import MANIFEST, Manifest, checksum_of
from accelerate_lshdp.checkpoint.run_state import (
    NodeLayout,
    TrainingObjects,
    load_checkpoint,
    save_checkpoint,
    save_model_file,
)
from accelerate_lshdp.checkpoint.stream import WrittenFile


def save(folder, training, **options):
    save_checkpoint(folder, training, one_process(), plan_digest="p", step=1, samples_seen=4, seed=0, **options)


def load(folder, training, **options):
    return load_checkpoint(folder, training, one_process(), plan_digest="p", **options)


def refuse(folder, training, match, **options):
    before = full_state(training) if training.schedulers else None
    with pytest.raises(RuntimeError, match=match):
        load(folder, training, **options)
    if before is not None:
        assert_same(full_state(training), before)


def step(model, optimizer, count=2):
    for _ in range(count):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True, betas=(0.7, 0.9)),
    "tensor learning rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs-like": lambda p: Counting(p),
}


class Counting(torch.optim.SGD):
    """Keeps a value beside the state of the parameters, and plain values in it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.state["calls"] = 0

    def step(self, closure=None):
        self.state["calls"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [self.state["calls"], "step", None]
        return super().step(closure)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_go_on_where_they_stopped(tmp_path, name, dtype):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(dtype)
        model.register_forward_pre_hook(lambda _, inputs: tuple(value.to(dtype) for value in inputs))
        return model, OPTIMIZERS[name](model.parameters())

    model, optimizer = build(0)
    step(model, optimizer)
    save(tmp_path / "a", TrainingObjects([model], [optimizer]))
    step(model, optimizer)
    other, other_optimizer = build(1)
    step(other, other_optimizer, 1)
    load(tmp_path / "a", TrainingObjects([other], [other_optimizer]))
    step(other, other_optimizer)
    assert_same(other.state_dict(), model.state_dict())
    found, expected = (value.state_dict() for value in (other_optimizer, optimizer))
    assert found["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        if isinstance(state, dict):
            assert state.keys() == found["state"][index].keys()
            assert all(type(state[key]) is type(found["state"][index][key]) for key in state)
        else:
            assert found["state"][index] == state


def test_parameters_are_found_by_name_whatever_the_order_of_groups(tmp_path):
    training = objects(steps=2)
    save(tmp_path / "a", training)
    other = objects(seed=1, steps=1)
    groups = other.optimizers[0].param_groups
    groups.reverse()
    for group in groups:
        group["params"].reverse()
    load(tmp_path / "a", other)
    groups.reverse()
    assert_same(full_state(other), full_state(training))


def test_several_models_optimizers_and_schedulers(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        models = [nn.Linear(3, 2), nn.Linear(3, 5)]
        optimizers = [
            torch.optim.AdamW(models[1].parameters(), lr=0.1),
            torch.optim.SGD([*models[0].parameters()], lr=0.2, momentum=0.5),
        ]
        for model, optimizer in zip(models, reversed(optimizers), strict=True):
            step(model, optimizer, seed + 1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0)
        plateau.step(2.0 - seed)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizers[1], lambda epoch: 1 / (epoch + 1))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 10)
        chained = torch.optim.lr_scheduler.SequentialLR(optimizers[1], [warm, cosine], [1])
        chained.step()
        return TrainingObjects(
            models, optimizers, [plateau, chained], torch.amp.GradScaler("cpu", init_scale=2.0 + seed)
        )

    first, second = build(0), build(3)
    save(tmp_path / "a", first)
    load(tmp_path / "a", second)
    for one, other in zip([*first.models], [*second.models], strict=True):
        assert_same(other.state_dict(), one.state_dict())
    for one, other in zip(first.schedulers, second.schedulers, strict=True):
        assert other.state_dict() == one.state_dict()
    assert second.scaler.state_dict() == first.scaler.state_dict()
    for one, other in zip(first.optimizers, second.optimizers, strict=True):
        assert str(other.state_dict()) == str(one.state_dict())


def test_a_scaler_on_one_side_only_is_said(tmp_path):
    save(tmp_path / "a", TrainingObjects(scaler=torch.amp.GradScaler("cpu")))
    with pytest.warns(UserWarning, match="the checkpoint has a gradient scaler, the run none"):
        load(tmp_path / "a", TrainingObjects())


class Extra(nn.Linear):
    def __init__(self, calls):
        super().__init__(2, 2)
        self.calls = calls

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_of_modules(tmp_path):
    save(tmp_path / "a", TrainingObjects([nn.Sequential(Extra(5), nn.Linear(2, 2))]))
    model = nn.Sequential(Extra(0), nn.Linear(2, 2))
    load(tmp_path / "a", TrainingObjects([model]))
    assert model[0].calls == 5


def test_names_of_wrappers_are_not_in_the_checkpoint(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    save(tmp_path / "a", TrainingObjects([torch.compile(model)]))
    other = nn.Sequential(nn.Linear(2, 2))
    load(tmp_path / "a", TrainingObjects([other]))
    assert_same(other.state_dict(), model.state_dict())


class Registered:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class OfTheUser:
    """A type that only pickle knows."""

    def __eq__(self, other):
        return type(other) is type(self)

    __hash__ = None


def test_registered_objects(tmp_path):
    state = {"tensor": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 3: ("a", None)}
    save(tmp_path / "a", TrainingObjects(custom=[Registered(copy.deepcopy(state))]))
    restored = Registered({})
    load(tmp_path / "a", TrainingObjects(custom=[restored]))
    assert_same({"tensor": restored.state.pop("tensor")}, {"tensor": state.pop("tensor")})
    assert restored.state == state


def test_pickle_only_on_request_on_both_sides(tmp_path):
    training = TrainingObjects(custom=[Registered({"value": OfTheUser()})])
    with pytest.raises(RuntimeError, match="(?s)registered object 0 .*OfTheUser.*trust_checkpoint=True"):
        save(tmp_path / "a", training)
    assert visible(tmp_path) == []
    save(tmp_path / "a", training, trust_checkpoint=True)
    other = TrainingObjects(custom=[Registered(None)])
    refuse(tmp_path / "a", other, "saved with pickle.*trust_checkpoint=True")
    load(tmp_path / "a", other, trust_checkpoint=True)
    assert other.custom[0].state == {"value": OfTheUser()}


class Shaped(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, (shape, dtype) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


F32 = torch.float32


@pytest.mark.parametrize(
    ("current", "message"),
    [
        ({"a": ((2,), F32)}, "missing none, unexpected b"),
        ({"a": ((2,), F32), "b": ((3,), F32), "c": ((1,), F32)}, "missing c, unexpected none"),
        ({"a": ((2,), F32), "b": ((4,), F32)}, r"'b' has shape \[3\] in the checkpoint and \[4\] in this run"),
        ({"a": ((2,), F32), "b": ((3,), torch.float64)}, "'b' is torch.float32 in the checkpoint and torch.float64"),
    ],
)
def test_a_model_that_differs_is_refused(tmp_path, current, message):
    save(tmp_path / "a", TrainingObjects([Shaped(a=((2,), F32), b=((3,), F32))]))
    refuse(tmp_path / "a", TrainingObjects([Shaped(**current)]), message)


def test_tied_now_but_not_when_saved(tmp_path):
    untied = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, 2)})
    tied = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, 2)})
    tied["y"].weight = tied["x"].weight
    save(tmp_path / "untied", TrainingObjects([untied]))
    refuse(tmp_path / "untied", TrainingObjects([tied]), "tied in this run, not in the checkpoint")
    save(tmp_path / "tied", TrainingObjects([tied]))
    load(tmp_path / "tied", TrainingObjects([untied]))
    assert torch.equal(untied["y"].weight, tied["x"].weight)


@pytest.mark.parametrize("kind", ["models", "optimizers", "schedulers", "custom"])
def test_another_number_of_objects_is_refused(tmp_path, kind):
    training = objects(steps=1)
    training.custom = [Registered({})]
    save(tmp_path / "a", training)
    setattr(training, kind, getattr(training, kind) * 2)
    refuse(tmp_path / "a", training, "the checkpoint holds 1 .*, this run has 2")


def test_an_optimizer_over_other_parameters_is_refused(tmp_path):
    training = objects(steps=1)
    save(tmp_path / "a", training)
    del training.optimizers[0].param_groups[1]["params"][0]
    refuse(tmp_path / "a", training, "optimizer parameters are not those of this run: .*unexpected model_0.")


def test_groups_that_join_what_had_different_options_are_refused(tmp_path):
    save(tmp_path / "a", objects(steps=1))
    other = objects(steps=1)
    first, second = other.optimizers[0].param_groups
    first["params"] += second["params"]
    second["params"] = []
    refuse(tmp_path / "a", other, r"group 0 joins parameters that were saved in groups \[0, 1\]")


def test_a_parameter_of_no_model_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(7))], lr=1.0)
    with pytest.raises(RuntimeError, match=r"parameter of shape \[7\] that belongs to none of the models"):
        save(tmp_path / "a", TrainingObjects([model], [optimizer]))
    assert visible(tmp_path) == []


def test_another_version_is_refused(tmp_path):
    save(tmp_path / "a", TrainingObjects())
    path = tmp_path / "a" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    refuse(tmp_path / "a", TrainingObjects(), "has version 2, this release reads version 1")


def test_a_header_damaged_before_the_checksum_was_made_is_refused(tmp_path):
    """Checksums tell of damage since the save; what was wrong then must still not pass."""
    training = objects(steps=1)
    save(tmp_path / "a", training)
    folder = tmp_path / "a"
    path = folder / "model_0.safetensors"
    data = bytearray(path.read_bytes())
    data[:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(data)
    manifest = Manifest.read(folder)
    os.unlink(folder / MANIFEST)
    manifest.files[path.name] = WrittenFile(len(data), checksum_of(path))
    (folder / MANIFEST).write_text(manifest.to_json())
    refuse(folder, training, "is not a valid safetensors file")


def test_transformers_loads_the_model_file(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    config.save_pretrained(tmp_path)
    save_model_file(tmp_path / "model.safetensors", model, one_process(), is_writer=True)
    loaded, report = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same(loaded.state_dict(), model.state_dict())


def test_a_layout_that_contradicts_the_process_group():
    with pytest.raises(ValueError, match="says rank 1 of 2, the process group says 0 of 1"):
        NodeLayout(rank=1, world_size=2, node=0, num_nodes=1, local_rank=1, device=CPU)


@settings(max_examples=15, deadline=None)
@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=4), steps=st.integers(0, 2), seed=st.integers(0, 9))
def test_any_model_comes_back(tmp_path_factory, widths, steps, seed):
    def build(seed):
        torch.manual_seed(seed)
        sizes = [3, *widths]
        layers = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
        model = nn.Sequential(*layers)
        return TrainingObjects([model], [torch.optim.Adam(model.parameters())])

    folder = tmp_path_factory.mktemp("any") / "a"
    first, second = build(seed), build(seed + 1)
    step(first.models[0], first.optimizers[0], steps)
    save(folder, first)
    load(folder, second)
    for training in (first, second):
        torch.manual_seed(0)
        step(training.models[0], training.optimizers[0], 1)
    assert_same(second.models[0].state_dict(), first.models[0].state_dict())


def test_saving_draws_no_random_numbers_and_changes_nothing(tmp_path):
    training = objects(steps=1)
    torch.manual_seed(3)
    before, expected = full_state(training), torch.rand(2)
    torch.manual_seed(3)
    save(tmp_path / "a", training)
    assert torch.equal(torch.rand(2), expected)
    assert_same(full_state(training), before)
