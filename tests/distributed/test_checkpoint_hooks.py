# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Hooks that a script registers for `save_state` and `load_state` keep accelerate's contract under every strategy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from exactness import full
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from accelerate_lshdp import LSHDPAccelerator, Plan


class Training:
    """Two models, one optimizer over both, a loader."""

    def __init__(self, strategy: str) -> None:
        torch.manual_seed(3)
        self.accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy=strategy))
        models = [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)).double() for _ in range(2)]
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(torch.randn(16, 4, generator=generator, dtype=torch.float64)), batch_size=2)
        *self.models, self.optimizer, self.loader = self.accelerator.prepare(*models, optimizer, loader)

    def steps(self, loader=None, stop: int = 4) -> None:
        for number, (x,) in enumerate(self.loader if loader is None else loader, 1):
            self.accelerator.backward((self.models[1](self.models[0](x)) - 1).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if number == stop:
                break

    def values(self) -> list[dict[str, torch.Tensor]]:
        return [{name: full(parameter) for name, parameter in model.named_parameters()} for model in self.models]


def equal(one: list[dict], other: list[dict]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def take(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = weights[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def save_and_load_by_hooks(strategy: str, root: str, popped: int) -> dict:
    """The hooks save and load the last `popped` models, as scripts that write another format do."""
    seen: dict = {"saved": [], "loaded": []}

    def save(models: list, weights: list, output_dir: str) -> None:
        folder = Path(output_dir)
        ours = [path.name for path in folder.iterdir() if path.name != "own"]
        seen["saved"].append((folder.name, ours, (Path(root) / "ckpt").exists()))
        seen["models"] = [model is mine for model, mine in zip(models, training.models, strict=True)]
        seen["weights"] = [{name: value.clone() for name, value in state.items()} for state in weights]
        for index in reversed(range(len(models) - popped, len(models))):
            if training.accelerator.is_main_process:
                (folder / "own").mkdir(exist_ok=True)
                save_file(weights[index], folder / "own" / f"{index}.safetensors")
                weights.pop()  # on the main process only, as many scripts do

    def load(models: list, input_dir: str) -> None:
        seen["loaded"].append(input_dir)
        for _ in range(popped):
            take(models.pop(), load_file(Path(input_dir) / "own" / f"{len(models)}.safetensors"))

    training = Training(strategy)
    training.accelerator.register_save_state_pre_hook(save)
    training.steps(stop=2)
    here = training.values()
    training.accelerator.save_state(f"{root}/ckpt")
    training.steps(training.accelerator.skip_first_batches(training.loader, 2))
    end = training.values()

    again = Training(strategy)
    again.accelerator.register_load_state_pre_hook(load)
    training = again
    again.accelerator.load_state(f"{root}/ckpt")
    seen["restored"] = equal(again.values(), here)
    seen["kept"] = [model is mine for model, mine in zip(again.accelerator._models, again.models, strict=True)]
    again.steps(again.accelerator.skip_first_batches(again.loader))
    seen["continued"] = equal(again.values(), end)
    return {**seen, "here": here}


@pytest.mark.parametrize(
    ("strategy", "nodes", "popped"), [("ddp", (1, 1), 2), ("lsdp", (2,), 1), ("lsdp", (1, 1), 2), ("fsdp", (2,), 1)]
)
def test_hooks_may_save_and_load_models_themselves(workers, tmp_path, strategy, nodes, popped):
    told = workers(2).run(save_and_load_by_hooks, strategy, str(tmp_path), popped, nodes=nodes)
    for rank, seen in enumerate(told):
        assert seen["saved"] == [("ckpt", [], False)]  # before anything was written
        assert seen["models"] == seen["kept"] == [True, True]
        assert seen["loaded"] == [str(tmp_path / "ckpt")]
        assert seen["restored"] and seen["continued"]
        if rank == 0 or strategy != "fsdp":
            assert equal(seen["here"], seen["weights"])
        else:
            assert seen["weights"] == [{}, {}]  # the full state is on one rank of a node
    names = {path.name for path in (tmp_path / "ckpt").iterdir()}
    assert {name for name in names if name.startswith("model_")} == {
        f"model_{i}.safetensors" for i in range(2 - popped)
    }
    assert {path.name for path in (tmp_path / "ckpt" / "own").iterdir()} == {
        f"{i}.safetensors" for i in range(2 - popped, 2)
    }
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def save_on_every_rank(strategy: str, root: str, last: int) -> list[dict]:
    """The hook does not ask who it is, as in examples of PEFT: ranks without the states save empty ones."""
    training = Training(strategy)
    rank = training.accelerator.process_index

    def save(models: list, weights: list, output_dir: str) -> None:
        folder = Path(output_dir) / "models"
        folder.mkdir(exist_ok=True)
        if rank == last:
            time.sleep(0.3)
        for index in reversed(range(len(models))):
            save_file(weights.pop(), folder / f"{index}.safetensors")
        for place in (folder, folder.parent):
            (place / f"of_rank_{rank}.txt").write_text("its own")

    training.accelerator.register_save_state_pre_hook(save)
    training.steps(stop=2)
    training.accelerator.save_state(f"{root}/ckpt")
    return training.values()


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(("strategy", "nodes"), [("fsdp", (2,)), ("fsdp", (1, 1)), ("lsdp", (2,))])
def test_ranks_without_states_replace_nothing_that_others_have_saved(workers, tmp_path, strategy, nodes, last):
    values, _ = workers(2).run(save_on_every_rank, strategy, str(tmp_path), last, nodes=nodes)
    folder = tmp_path / "ckpt" / "models"
    assert equal(values, [load_file(folder / f"{index}.safetensors") for index in range(2)])
    own = {"of_rank_0.txt", "of_rank_1.txt"}
    assert {path.name for path in folder.iterdir()} == {"0.safetensors", "1.safetensors"} | own
    found = {path.name for path in (tmp_path / "ckpt").iterdir()}
    assert own <= found and not [name for name in found if name.startswith("ckpt")]
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def save_with(kind: str, root: str) -> str:
    """A hook that does what it must not, on rank 1 alone."""
    training = Training("lsdp")
    rank = training.accelerator.process_index

    def hook(models: list, weights: list, output_dir: str) -> None:
        if kind == "raise" and rank == 1:
            raise ValueError("the disk of rank 1 is full")
        if kind == "change" and rank == 1:
            weights[0]["0.weight"] = weights[0]["0.weight"] * 2
        if kind == "add":
            weights.append({})
        if kind == "name" and rank == 0:
            (Path(output_dir) / "training.json").write_text("{}")

    training.accelerator.register_save_state_pre_hook(hook)
    training.accelerator.save_state(f"{root}/ckpt")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "the disk of rank 1 is full"),
        ("change", "a hook of save_state changed the state dict of model 0"),
        ("add", "a hook of save_state added"),
        ("name", "training.json, a name of the checkpoint's own"),
    ],
)
def test_a_save_hook_that_cannot_be_honoured_is_an_error_on_all_ranks(workers, tmp_path, kind, message):
    errors = workers(2).run(save_with, kind, str(tmp_path), expect_failure=True)
    assert all(message in error.message for error in errors), errors
    assert list(tmp_path.iterdir()) == []


def load_on_one_rank(root: str) -> None:
    training = Training("lsdp")
    training.accelerator.save_state(f"{root}/ckpt")

    def hook(models: list, input_dir: str) -> None:
        if training.accelerator.process_index == 1:
            models.pop()

    training.accelerator.register_load_state_pre_hook(hook)
    training.accelerator.load_state(f"{root}/ckpt")


def test_a_load_hook_that_takes_a_model_on_one_rank_only_is_an_error_on_all_ranks(workers, tmp_path):
    errors = workers(2).run(load_on_one_rank, str(tmp_path), expect_failure=True)
    assert all("took other models on some ranks" in error.message for error in errors), errors


def load_without_hook(root: str) -> None:
    training = Training("lsdp")
    handle = training.accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: weights.clear())
    training.accelerator.save_state(f"{root}/ckpt")
    handle.remove()
    training.accelerator.load_state(f"{root}/ckpt")


def test_a_checkpoint_of_hooks_needs_them_to_load(workers, tmp_path):
    errors = workers(2).run(load_without_hook, str(tmp_path), expect_failure=True)
    assert all("holds 0 models" in error.message and "hook" in error.message for error in errors), errors
