# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What an accelerator keeps beside models and optimizers, its plan and positions: wrong ones change nothing at all."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import node_folder
from file_mutations import json_text, mutate
from test_checkpoint_damage import TRAINING, change, damage
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from accelerate_lshdp import LSHDPAccelerator
from accelerate_lshdp.data.prepare import HeterogeneousDataLoader


#: path in the document, value
WRONG: dict[str, tuple[str, Any]] = {
    "no plan": ("extra/plan", KeyError),
    "a plan of an unknown strategy": ("extra/plan/strategy", "fast"),
    "a plan that is none": ("extra/plan", 3),
    "no step": ("extra/accelerate_step", None),
    "a step before the first": ("extra/accelerate_step", -1),
    "a loss of an unknown kind": (
        "extra/losses",
        {"trainer": {"compositions": {"labels: integer 1": []}}, "loop": {}},
    ),
    "no list of micro-batches": ("loaders/0/micro_batches", 3),
    "micro-batches that are words": ("loaders/0/micro_batches", ["1"]),
    "no list of workers": ("loaders/0/worker_samples", 7),
    "a word for a pass that is read": ("loaders/0/exhausted", "x"),
    "a number for an epoch that is trained": ("loaders/0/complete", 1),
    "no order": ("loaders/0/order", KeyError),
    "an order that is a number": ("loaders/0/order", 3),
    "no seed": ("loaders/0/seed", None),
    "a generator that is a number": ("loaders/0/sampler_generator", 3),
    "a generator that is a word": ("loaders/0/sampler_generator", "zz"),
    "a later generator that is a word": ("loaders/0/next_sampler_generator", "zz"),
}


class Run:
    """Two checkpoints, of steps 1 and 2, and the run that made them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.accelerator = LSHDPAccelerator(cpu=True)
        data = TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(0)))
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.1), DataLoader(data, batch_size=2, shuffle=True)
        )
        for step, (batch,) in enumerate(self.loader):
            self.train(batch)
            if step < 2:
                self.accelerator.save_state(folder / f"step_{step + 1}")
        self.documents = (folder / "step_2" / TRAINING).read_bytes()

    def train(self, batch: torch.Tensor) -> None:
        self.accelerator.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[float]:
        return torch.cat([parameter.flatten() for parameter in self.model.parameters()]).tolist()

    def damage(self, path: str, value: Any) -> None:
        document = json.loads(self.documents)
        change(document, path, value)
        damage(self.folder / "step_2", TRAINING, json.dumps(document).encode())

    def load(self) -> int | str:
        """The step of the checkpoint that was loaded, or the one clear error, after which nothing has changed."""
        before, steps = self.parameters(), self.accelerator.completed_steps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.accelerator.load_state(self.folder).step
            except RuntimeError as error:
                assert (self.parameters(), self.accelerator.completed_steps) == (before, steps)
                return str(error)


def load_each(root: str, damaged: list[str]) -> dict[str, int | str]:
    run = Run(node_folder(root))
    found = {}
    for name, (path, value) in WRONG.items():
        if f"node{os.environ['GROUP_RANK']}" in damaged:
            run.damage(path, value)
        run.accelerator.wait_for_everyone()
        found[name] = run.load()
    return found


@pytest.mark.parametrize(("damaged", "step"), [(["node1"], 2), (["node0", "node1"], 1)])
def test_wrong_positions_are_passed_over_on_all_ranks(workers, tmp_path, damaged, step):
    """One good copy serves all; where no node has one, all go back to the older checkpoint."""
    found = workers(2).run(load_each, str(tmp_path), damaged, nodes=(1, 1))
    assert found == [dict.fromkeys(WRONG, step)] * 2


def load_different_documents(root: str) -> int | str:
    run = Run(node_folder(root))
    if run.accelerator.process_index == 1:
        run.damage("loaders/0/samples", 8)
    run.accelerator.wait_for_everyone()
    return run.load()


def test_nodes_with_different_positions_use_neither(workers, tmp_path):
    """Both are well-formed: ranks would go on from different samples, and nobody knows which are right."""
    assert workers(2).run(load_different_documents, str(tmp_path), nodes=(1, 1)) == [1, 1]


def load_into_another_run(root: str, change_run: str) -> int | str:
    run = Run(node_folder(root))
    data = TensorDataset(torch.zeros(16, 2))
    if change_run == "a loader more":
        run.accelerator.prepare(DataLoader(data, batch_size=2))
    elif change_run == "a generator":
        run.damage("loaders/0/sampler_generator", torch.Generator().get_state().numpy().tobytes().hex())
    elif change_run == "a later generator":
        run.damage("loaders/0/next_sampler_generator", torch.Generator().get_state().numpy().tobytes().hex())
    else:
        run.accelerator._dataloaders.clear()
        sampler = RandomSampler(data, generator=torch.Generator())
        run.accelerator.prepare(DataLoader(data, batch_size=2, sampler=sampler))
        run.damage("loaders/0/sampler_generator", "00" * 16)
    run.accelerator.wait_for_everyone()
    return run.load()


@pytest.mark.parametrize(
    ("change_run", "message"),
    [
        ("a loader more", "has positions of 1 loaders, but 2 are prepared"),
        ("a generator", "found a checkpoint with the state of a sampler's generator"),
        ("a later generator", "found a checkpoint with the state of a sampler's generator"),
        ("a generator of another kind", "found a sampler_generator of another kind"),
    ],
)
def test_positions_of_another_run_are_an_error_before_anything_changes(workers, tmp_path, change_run, message):
    found = workers(2).run(load_into_another_run, str(tmp_path), change_run, nodes=(1, 1))
    assert len(set(found)) == 1 and message in found[0], found


def fail(*_: object) -> None:
    raise MemoryError("the device is full")


def load_while_one_rank_fails(root: str) -> str:
    run = Run(node_folder(root))
    restore = HeterogeneousDataLoader.load_state_dict
    if run.accelerator.process_index == 1:
        HeterogeneousDataLoader.load_state_dict = fail
    try:
        run.accelerator.load_state(run.folder)
    except RuntimeError as error:
        return str(error)
    finally:
        HeterogeneousDataLoader.load_state_dict = restore
    return "loaded"


def test_a_rank_that_cannot_go_on_stops_all(workers, tmp_path):
    for found in workers(2).run(load_while_one_rank_fails, str(tmp_path), nodes=(1, 1)):
        assert found.startswith("rank 1: continuing from checkpoint ") and "MemoryError: the device is full" in found


def load_mutations(root: str, cases: int) -> list[str]:
    run = Run(Path(root))
    broken = []
    for case in range(cases):
        document = json.loads(run.documents)
        section = ("loaders", "extra")[case % 2]
        text = mutate(document[section], json_text, f"positions {case}")
        document[section] = "the section"
        data = json.dumps(document).encode().replace(b'"the section"', text)
        damage(run.folder / "step_2", TRAINING, data)
        try:
            found = run.load()
        except Exception as error:
            broken.append(f"case {case}: {error!r:.300}")
            continue
        if found not in (1, 2) and "rank 0: loading checkpoint" not in str(found):
            broken.append(f"case {case}: {found}")
    return broken


def test_no_damage_of_positions_gets_past_the_choice(workers, tmp_path):
    (broken,) = workers(1).run(load_mutations, str(tmp_path), 200, timeout=120)
    assert not broken, "\n".join(broken[:5])
