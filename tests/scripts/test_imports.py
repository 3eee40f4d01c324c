# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What importing the package may do to a process: nothing that its other parts could notice."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

import accelerate
import pytest
from launching import launch
from trainer_runs import Sentences, arguments, collate, make_model
from transformers import Trainer
from workers import WorkerPools

from accelerate_lshdp import LSHDPAccelerator, LSHDPTrainer, Plan
from accelerate_lshdp.runtime import backend
from accelerate_lshdp.trainer import hook


# Third parties first, which may do what they like. A launched rank, because only there is anything to settle.
_IMPORT_ALL = """\
import importlib, json, os, pkgutil
import torch, transformers.trainer
import accelerate_lshdp

def state():
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {**os.environ, "affinity": str(cpus), "threads": str(torch.get_num_threads())}

found, changed, before = [], {}, state()
for module in pkgutil.walk_packages(accelerate_lshdp.__path__, "accelerate_lshdp."):
    importlib.import_module(module.name)
    found.append(module.name)
    after = state()
    if after != before:
        names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
        changed[module.name] = {name: (before.get(name), after.get(name)) for name in sorted(names)}
    before = after
for name in accelerate_lshdp.__all__:
    getattr(accelerate_lshdp, name)
changed["__all__"] = {name: value for name, value in state().items() if before.get(name) != value}
print(json.dumps([found, changed]))
"""


@pytest.mark.slow
def test_importing_changes_neither_environment_nor_affinity() -> None:
    left_to_us = {"ACCELERATE_USE_CPU": None, "ACCELERATE_USE_FSDP": "true", "OMP_NUM_THREADS": None}
    process = launch(["-c", _IMPORT_ALL], 1, env={**left_to_us, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert process.returncode == 0, process.stderr
    found, changed = json.loads(process.stdout)
    assert {"accelerate_lshdp.trainer.callback", "accelerate_lshdp.trainer.mixin", "accelerate_lshdp.run"} <= {*found}
    assert changed.pop("__all__") == {} and changed == {}


def learn_of_ranks(folder: str) -> tuple[int, int]:
    """What arguments say that are made after the import of our Trainer, but before any Trainer."""
    for _ in range(2):
        backend.prepare_at_first_state()
    args = arguments(folder, use_cpu=False, max_steps=1)
    return args.world_size, args.process_index


def test_arguments_made_after_the_import_know_the_other_ranks(workers: WorkerPools, tmp_path: object) -> None:
    """As in a launch by accelerate, whose `use_cpu` does not reach the processes."""
    found = workers(2).run(learn_of_ranks, str(tmp_path), nodes=(1, 1), env={"ACCELERATE_USE_CPU": None})
    assert found == [(2, 0), (2, 1)]


@contextlib.contextmanager
def other_transformers(missing: str) -> Iterator[None]:
    """As with a release whose Trainer lacks what we replace: a method, or what a module of ours imports."""
    names, module = dict(vars(Trainer)), "accelerate_lshdp.trainer.overrides"
    loaded = sys.modules.get(module)
    try:
        hook._classes.clear()
        if missing == "a module":
            sys.modules[module] = None
        else:
            delattr(Trainer, missing)
        yield
    finally:
        hook._classes.clear()
        sys.modules.pop(module, None)
        if loaded is not None:
            sys.modules[module] = loaded
        for name in [name for name in vars(Trainer) if name not in names]:
            delattr(Trainer, name)
        for name, value in names.items():
            if vars(Trainer).get(name) is not value:
                setattr(Trainer, name, value)


def use_other_transformers(folder: str, missing: str) -> list[str]:
    given = {"args": arguments(folder), "data_collator": collate, "train_dataset": Sentences(20, "rows")}
    with other_transformers(missing):
        accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"))
        told = [type(accelerator.prepare(make_model("rows"))).__name__]
        given["args"] = arguments(folder)
        told.append(type(Trainer(make_model("rows"), **given).accelerator).__name__)
        for _ in range(2):
            given["args"] = arguments(folder)
            try:
                LSHDPTrainer(make_model("rows"), **given, plan=Plan.equal(strategy="ddp"))
            except RuntimeError as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("missing", ["_run_epoch", "a module"])
def test_only_a_trainer_of_ours_needs_the_known_transformers(
    workers: WorkerPools, tmp_path: object, missing: str
) -> None:
    [(prepared, plain, *errors)] = workers(1).run(use_other_transformers, str(tmp_path), missing, nodes=(1,))
    assert prepared.endswith("BertForSequenceClassification") and plain == accelerate.Accelerator.__name__
    assert len(errors) == 2 and errors[0] == errors[1]
    for part in (
        "in the Trainer of the installed transformers",
        "expected it as in 5.5 to 5.23",
        "install one of these versions",
    ):
        assert part in errors[0]
    assert missing in errors[0] or missing == "a module"
