# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainers with several tasks in turn, whose losses are means over different things, or sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_trials import listening
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_runs import arguments, full_parameters
from training_cases import relative_error
from transformers import Trainer
from workers import WorkerPools

from accelerate_lshdp import LSHDPTrainerMixin, Plan


TOTAL = 5
LENGTH, CLASSES = 6, 4


class Tasks(torch.utils.data.Dataset):
    """Whole batches of rows with one label each, and of rows with one for some words, in turn."""

    def __len__(self) -> int:
        return 8 * TOTAL

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 20, (LENGTH,), generator=generator)
        labels = torch.randint(0, CLASSES, (LENGTH,), generator=generator)
        if index // TOTAL % 2 == 0:
            return {"ids": ids, "labels": labels[0], "task": 0}
        labels[1 + index % LENGTH :] = -100
        return {"ids": ids, "labels": labels, "task": 1}


def collate(rows: list[dict[str, Any]], how: str) -> dict[str, Any]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("ids", "labels")}
    task = rows[0]["task"]
    if how == "dimensions":
        return batch
    if batch["labels"].ndim == 2:
        batch["labels"] = batch["labels"][:, 0]
    if how == "text":
        return batch | {"task": ("mean", "sum")[task]}
    return batch | {"task": torch.full((len(rows),), task)}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


class TaskTrainer(Trainer):
    def _get_train_sampler(self, *unused: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits, labels = model(inputs["ids"]), inputs["labels"]
        if labels.ndim == 2:
            return cross_entropy(logits.flatten(0, 1), labels.flatten())
        task = inputs.get("task", "mean")
        adds = task == "sum" if isinstance(task, str) else bool(task[0])
        losses = cross_entropy(logits.mean(1), labels, reduction="none")
        return losses.sum() / 3 if adds else losses.mean()


def train(
    folder: str, how: str, sizes: list | None, strategy: str, rate: float, accumulation: int = 1
) -> tuple[dict, list, list]:
    options = {"remove_unused_columns": False, "num_train_epochs": 1, "logging_steps": 1, "max_grad_norm": 1e9}
    options |= {"learning_rate": rate, "per_device_train_batch_size": TOTAL, "include_num_input_tokens_seen": "no"}
    options["gradient_accumulation_steps"] = accumulation
    kinds, more = (TaskTrainer,), {}
    if sizes is not None:
        kinds = (LSHDPTrainerMixin, TaskTrainer)
        more = {"plan": Plan.from_batch_sizes(sizes, strategy=strategy, allow_unequal_accumulation=True)}
    trainer = type("Tasking", kinds, {})(
        model=Tagger().double(),
        args=arguments(folder, **options),
        data_collator=lambda rows: collate(rows, how),
        train_dataset=Tasks(),
        **more,
    )
    with listening() as told:
        trainer.train()
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return full_parameters(trainer), norms, told


@pytest.mark.parametrize("how", ["dimensions", "text"])
@pytest.mark.parametrize(
    ("sizes", "strategy", "nodes"),
    [([3, 2], "ddp", (1, 1)), ([3, 2], "fsdp", (1, 1)), ([(2, 2), (1, 1)], "ddp", (1, 1))],
)
def test_tasks_that_batches_tell_are_tried_each_for_itself(
    workers: WorkerPools, tmp_path: Path, how: str, sizes: list, strategy: str, nodes: tuple[int, ...]
) -> None:
    [(expected, norms, _)] = workers(1).run(train, str(tmp_path), how, None, "", 3e-3, nodes=(1,))
    for parameters, found, told in workers(2).run(train, str(tmp_path), how, sizes, strategy, 3e-3, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12
        assert found == pytest.approx(norms, rel=1e-9)
        assert not told


@pytest.mark.parametrize(
    ("sizes", "strategy", "nodes", "accumulation"),
    [
        ([3, 2], "ddp", (1, 1), 1),
        ([3, 2], "fsdp", (1, 1), 1),
        ([3, 2], "lsdp", (2,), 1),
        ([(2, 2), (1, 1)], "ddp", (1, 1), 2),
    ],
)
def test_tasks_that_look_alike_are_tried_in_each_step_once_that_is_seen(
    workers: WorkerPools, tmp_path: Path, sizes: list, strategy: str, nodes: tuple[int, ...], accumulation: int
) -> None:
    """All steps have the gradient of one process, but for the first with another loss, of which a warning tells."""
    [(_, norms, _)] = workers(1).run(train, str(tmp_path), "alike", None, "", 0.0, accumulation, nodes=(1,))
    results = workers(2).run(train, str(tmp_path), "alike", sizes, strategy, 0.0, accumulation, nodes=nodes)
    seen = 2 // accumulation  # steps until the first batch of the other task was trained
    for _, found, _ in results:
        assert found[: seen - 1] == pytest.approx(norms[: seen - 1], rel=1e-9)
        assert found[seen:] == pytest.approx(norms[seen:], rel=1e-9)
    told = [text for _, _, texts in results for text in texts]
    assert ["another operation made" in text for text in told] == [True]  # by the main process


class Files(Tasks):
    def __len__(self) -> int:
        return 40


def looks_of_texts(folder: str) -> tuple[int, list[str]]:
    """Micro-batches of one sample, which nobody can halve, each with a text of its own."""
    plan = Plan.from_batch_sizes([1, 1], strategy="ddp")
    options = {"remove_unused_columns": False, "num_train_epochs": 1, "include_num_input_tokens_seen": "no"}
    trainer = type("Tasking", (LSHDPTrainerMixin, TaskTrainer), {})(
        model=Tagger().double(),
        args=arguments(folder, **options),
        data_collator=lambda rows: collate(rows, "alike") | {"file": str(rows[0]["ids"].tolist())},
        train_dataset=Files(),
        plan=plan,
    )
    with listening() as told:
        trainer.train()
    return len(trainer.lshdp_losses._trials._trials), told


def test_texts_that_name_no_task_are_not_tried_for_ever(workers: WorkerPools, tmp_path: Path) -> None:
    for looks, told in workers(2).run(looks_of_texts, str(tmp_path), nodes=(1, 1)):
        assert looks <= 34
        assert sum("no rank can try" in text for text in told) <= 1
