# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints whose checksums are right and whose contents are not: said in one line, and an older one is taken."""

from __future__ import annotations

import copy
import json
import os
import re
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from checkpoint_cases import assert_same, full_state, node_folder, objects, one_process
from file_mutations import json_text, mutate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.checkpoint.folder import MANIFEST, Manifest, checksum_of
from accelerate_lshdp.checkpoint.manifest import _checksum
from accelerate_lshdp.checkpoint.run_state import TrainingObjects, load_checkpoint, save_checkpoint
from accelerate_lshdp.checkpoint.stream import WrittenFile


TRAINING = "training.json"
#: With those of test_damaged_files 2,000 cases.
CASES = {TRAINING: 250, MANIFEST: 100}


class Registered:
    """An object of a user, with a value of every kind that a document holds."""

    def __init__(self, value: int) -> None:
        self.state: dict[str, Any] = {"value": value, "pair": (1, 2.5), "tensor": torch.ones(2), "kind": torch.float16}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def a_run(seed: int = 0, steps: int = 0) -> TrainingObjects:
    training = objects(seed=seed, steps=steps)
    training.loaders, training.extra = [{"epoch": 1, "samples": 8}], {"step": 3, "nested": {"list": [1, None]}}
    training.custom = [Registered(seed)]
    return training


def two_checkpoints(folder: Path) -> tuple[TrainingObjects, dict[str, torch.Tensor]]:
    """An older one and a newer one, and the state in the older one."""
    training = a_run(steps=1)
    kept: dict[str, torch.Tensor] = {}
    for step, name in ((1, "older"), (2, "newer")):
        options = {"plan_digest": "p", "step": step, "samples_seen": 4 * step, "seed": 0}
        save_checkpoint(folder / name, training, one_process(), **options)
        kept = kept or full_state(training)
    return training, kept


def sign(folder: Path) -> None:
    """Gives a checkpoint's manifest the checksums of what is in its files now."""
    document = json.loads((folder / MANIFEST).read_text())
    for name in document["files"]:
        document["files"][name] = {"bytes": (folder / name).stat().st_size, "crc32": checksum_of(folder / name)}
    document["checksum"] = _checksum(document)
    (folder / MANIFEST).write_text(json.dumps(document))


def damage(folder: Path, name: str, data: bytes) -> None:
    """Replaces a document by other bytes, with right checksums where they can have any."""
    (folder / name).write_bytes(data)
    if name == TRAINING:
        sign(folder)
        return
    try:
        document = json.loads(data)
        document["checksum"] = _checksum(document)
        (folder / name).write_text(json.dumps(document))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return  # nothing that could carry a checksum


def load(folder: Path, training: TrainingObjects, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load_checkpoint(folder, training, one_process(), plan_digest="p", **options)
    return loaded, [str(warning.message) for warning in caught]


def what_went_wrong(folder: Path, training: TrainingObjects) -> str | None:
    """How a load broke its promise: the newer or, with a warning that says why, the older; or one clear error."""
    before = full_state(training)
    try:
        loaded, said = load(folder, training)
    except RuntimeError as error:
        message = str(error)
        try:
            assert_same(full_state(training), before)
        except AssertionError:
            return f"changed something before it failed: {message}"
        clear = re.match(r"rank 0: loading checkpoint \S+ failed: ValueError: ", message)
        return None if clear and len(message) < 1500 else f"not clear: {message[:1000]}"
    except Exception as error:
        return "".join(traceback.format_exception(error)[-3:])
    if loaded.step == 1 and not any("newer" in text and len(text) < 1500 for text in said):
        return f"took the older one without a word: {said}"
    return None


@pytest.mark.parametrize("name", CASES)
def test_wrong_contents_are_passed_over_or_refused(tmp_path: Path, name: str) -> None:
    training, _ = two_checkpoints(tmp_path)
    good = tmp_path / "newer"
    documents = {file: (good / file).read_bytes() for file in (TRAINING, MANIFEST)}
    broken = []
    for case in range(CASES[name]):
        for file, data in documents.items():
            (good / file).write_bytes(data)
        damage(good, name, mutate(json.loads(documents[name]), json_text, f"{name} {case}"))
        found = what_went_wrong(tmp_path, training)
        if found is not None:
            broken.append(f"case {case}: {found}")
        training = a_run(seed=case % 3) if case % 25 == 0 else training
        training.custom = [Registered(0)]
    assert not broken, f"{len(broken)} of {CASES[name]}:\n" + "\n".join(broken[:5])


def change(document: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for section in sections:
        document = document[section]
    if value is KeyError:
        del document[last]
    else:
        document[last] = value


WRONG = {
    "no section": ("optimizers", KeyError),
    "a section of another kind": ("models", {"aliases": {}}),
    "an alias of nothing": ("models/0/aliases", {"head.weight": "nowhere"}),
    "no options": ("optimizers/0/groups/0", {"parameters": []}),
    "a parameter of nothing": ("optimizers/0/groups/0/parameters/0", "model_0.nowhere"),
    "state of nothing": ("optimizers/0/state", {"model_0.nowhere": {}}),
    "a tensor of nothing": ("optimizers/0/state/model_0.scale/exp_avg/tensor", "nowhere"),
    "state of another shape": (
        "optimizers/0/state/model_0.scale/exp_avg/tensor",
        "optimizer_0/model_0.frozen/exp_avg",
    ),
    "schedulers that are none": ("schedulers", 3),
    "an unknown type": ("extra/step", {"$": "function", "name": "os.system"}),
    "a dtype that is a function": ("custom/0/state/kind", {"$": "dtype", "name": "save"}),
    "a tuple without items": ("custom/0/state/pair", {"$": "tuple"}),
    "generators of fewer ranks": ("random_states", []),
    "generators that are none": ("random_states/0/torch", None),
    "generators of no device": ("random_states/0/device_type", 3),
    "a position that is none": ("loaders/0", 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_older_one_is_taken_and_the_newer_one_named(tmp_path: Path, name: str) -> None:
    _, kept = two_checkpoints(tmp_path)
    document = json.loads((tmp_path / "newer" / TRAINING).read_text())
    path, value = WRONG[name]
    if name == "state of another shape":
        document["optimizers"][0]["state"]["model_0.scale"]["exp_avg"]["tensor"] = value = next(
            entry["exp_avg"]["tensor"]
            for parameter, entry in document["optimizers"][0]["state"].items()
            if parameter != "model_0.scale"
        )
    change(document, path, value)
    damage(tmp_path / "newer", TRAINING, json.dumps(document).encode())
    found = a_run(seed=1)
    loaded, said = load(tmp_path, found)
    assert loaded.step == 1
    assert_same(full_state(found), kept)
    assert len(said) == 1 and "newer" in said[0] and "has the right checksum, but wrong contents" in said[0]
    with pytest.raises(RuntimeError, match="there is no complete checkpoint there: .*wrong contents"):
        load(tmp_path / "newer", found)


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a generation that is a word": lambda document: document.update(generation="5"),
    "no step": lambda document: document.pop("step"),
    "another key": lambda document: document.update(author="me"),
    "files that are a list": lambda document: document.update(files=[]),
    "a file without a size": lambda document: document["files"].update(x={"crc32": 1}),
    "an identity that is a path": lambda document: document.update(save_id="../../x"),
    "no ranks": lambda document: document.update(world_size=0),
    "no documents": lambda document: document.update(files={}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_no_save_writes(tmp_path: Path, name: str) -> None:
    two_checkpoints(tmp_path)
    document = json.loads((tmp_path / "newer" / MANIFEST).read_text())
    MANIFESTS[name](document)
    damage(tmp_path / "newer", MANIFEST, json.dumps(document).encode())
    loaded, said = load(tmp_path, a_run(seed=1))
    assert loaded.step == 1 and len(said) == 1 and "newer" in said[0] and "found" in said[0]


def test_what_a_run_accepts_decides_too(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)

    def accepts(loaders: list[dict], extra: dict) -> None:
        if loaders != [{"epoch": 1, "samples": 8}] or extra["step"] != 3:
            raise ValueError("extra.step: found another one")

    assert load(tmp_path, a_run(), check_document=accepts)[0].step == 2
    document = json.loads((tmp_path / "newer" / TRAINING).read_text())
    document["extra"]["step"] = 4
    damage(tmp_path / "newer", TRAINING, json.dumps(document).encode())
    loaded, said = load(tmp_path, a_run(), check_document=accepts)
    assert loaded.step == 1 and "extra.step: found another one" in said[0]


def test_an_option_of_another_kind_is_no_option_of_this_run(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    document = json.loads((tmp_path / "newer" / TRAINING).read_text())
    document["optimizers"][0]["groups"][1]["options"]["lr"] = "fast"
    damage(tmp_path / "newer", TRAINING, json.dumps(document).encode())
    with pytest.raises(RuntimeError, match="option 'lr' of parameter group 1 is 'fast' in the checkpoint"):
        load(tmp_path, a_run())


def test_a_scheduler_that_is_none_of_this_run_changes_nothing(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    document = json.loads((tmp_path / "newer" / TRAINING).read_text())
    document["schedulers"] = [3]
    damage(tmp_path / "newer", TRAINING, json.dumps(document).encode())
    found = a_run(seed=1)
    before = full_state(found)
    with pytest.raises(RuntimeError, match="state of scheduler 0 is a int in the checkpoint and a dict in this run"):
        load(tmp_path, found)
    assert_same(full_state(found), before)


class ListedScheduler(torch.optim.lr_scheduler.LambdaLR):
    """One of a script's own, whose state is a list."""

    def state_dict(self) -> list[int]:
        return [self.last_epoch]

    def load_state_dict(self, state: list[int]) -> None:
        (self.last_epoch,) = state


def test_a_scheduler_says_what_its_state_is(tmp_path: Path) -> None:
    training = a_run(steps=1)
    training.schedulers = [scheduler := ListedScheduler(training.optimizers[0], lambda _: 1.0)]
    scheduler.last_epoch = 5
    save_checkpoint(tmp_path / "a", training, one_process(), plan_digest="p", step=1, samples_seen=4, seed=0)
    scheduler.last_epoch = 9
    assert load(tmp_path / "a", training)[0].step == 1 and scheduler.last_epoch == 5


def test_the_files_are_a_zip_of_nothing(tmp_path: Path) -> None:
    """Right checksums of files that are no safetensors files."""
    two_checkpoints(tmp_path)
    newer = tmp_path / "newer"
    (newer / "model_0.safetensors").write_bytes(b"nothing")
    sign(newer)
    assert Manifest.read(newer).files["model_0.safetensors"] == WrittenFile(7, zlib.crc32(b"nothing"))
    loaded, said = load(tmp_path, a_run())
    assert loaded.step == 1 and "is not a valid safetensors file" in said[0]


def resume(root: str, damaged: list[str]) -> tuple[int, int]:
    """Saves twice on two nodes, damages the newer one on some, and loads."""
    folder = node_folder(root)
    accelerator = LSHDPAccelerator(project_config=ProjectConfiguration(str(folder)), cpu=True)
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for step, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(folder / f"step_{step}")
        if step == 1:
            break
    if f"node{os.environ['GROUP_RANK']}" in damaged:
        newer = folder / "step_1"
        document = json.loads((newer / TRAINING).read_text())
        for state in document["loaders"]:
            state["samples"] = "8"
        damage(newer, TRAINING, json.dumps(document).encode())
    accelerator.wait_for_everyone()
    loaded = accelerator.load_state(folder)
    return loaded.step, len(list(folder.iterdir()))


@pytest.mark.parametrize(("damaged", "step"), [(["node1"], 2), (["node0", "node1"], 1)])
def test_nodes_agree_on_what_can_be_used(workers, tmp_path, damaged, step):
    """One good copy serves all; where no node has one, all go back to the older checkpoint."""
    assert workers(2).run(resume, str(tmp_path), damaged, nodes=(1, 1)) == [(step, 2)] * 2


def test_copies_of_a_document_are_independent() -> None:
    """The fuzz above changes copies; a change that leaked into the next case would hide what broke it."""
    document = {"a": [1, {"b": 2}]}
    before = copy.deepcopy(document)
    for case in range(50):
        mutate(document, json_text, f"leak {case}")
    assert document == before
