# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Invariant 4: what cannot be right in a script is told on all ranks before the first step, with what to do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from transformers.trainer_pt_utils import (
    BatchRebalanceSampler,
    DistributedLengthGroupedSampler,
    IterableDatasetShard,
    LengthGroupedSampler,
    ShardSampler,
)
from workers import WorkerError

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.accelerator.other_engines import fsdp_choices_without_effect, refuse_other_engines
from accelerate_lshdp.data.sampler_checks import own_batch_sampler, refuse_sharded_order
from accelerate_lshdp.trainer.checks import check_arguments


TIMEOUT_SECONDS = 60
ROWS, WIDTH = 24, 3


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((WIDTH,), float(index)), "labels": torch.tensor([float(index)])}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


class Budget(Sampler):
    """Batches of unequal size, as a limit of tokens makes them."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3], list(range(4, ROWS)))


class EveryOther(Sampler):
    """Divides by rank, and has no attribute that tells."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ["RANK"]), ROWS, 2))

    def __len__(self) -> int:
        return ROWS // 2


def same_error(errors: list[WorkerError | None], *parts: str) -> None:
    assert None not in errors, errors
    assert len({error.message for error in errors}) == 1, "\n".join(map(str, errors))
    for part in parts:
        assert part in errors[0].message, errors[0]


# Samplers

LENGTHS = list(range(1, ROWS + 1))
SHARDED: dict[str, dict[str, Any]] = {
    "DistributedSampler": {"sampler": DistributedSampler(Rows(), num_replicas=2, rank=1)},
    "DistributedSampler, in a batch sampler": {
        "batch_sampler": BatchSampler(DistributedSampler(Rows(), num_replicas=2, rank=0), 4, False)
    },
    "DistributedLengthGroupedSampler": {
        "sampler": DistributedLengthGroupedSampler(2, num_replicas=2, rank=0, lengths=LENGTHS)
    },
    "ShardSampler": {"sampler": ShardSampler(Rows(), num_processes=2, process_index=0)},
    "BatchRebalanceSampler": {"batch_sampler": BatchRebalanceSampler(LENGTHS, 8, dp_size=2, grad_accum=1)},
    "IterableDatasetShard": {"dataset": IterableDatasetShard(Stream(), num_processes=2, process_index=1)},
}
WHOLE: dict[str, dict[str, Any]] = {
    "DistributedSampler for one": {"sampler": DistributedSampler(Rows(), num_replicas=1, rank=0)},
    "LengthGroupedSampler": {"sampler": LengthGroupedSampler(2, lengths=LENGTHS)},
    "RandomSampler": {"sampler": RandomSampler(Rows())},
    "stream": {"dataset": Stream()},
}


@pytest.mark.parametrize("name", SHARDED)
def test_sampler_that_divides_by_rank_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{name.split(',')[0]} with .*=2, which gives each rank a part.*Leave it out"
    ):
        refuse_sharded_order(DataLoader(**{"dataset": Rows(), **SHARDED[name]}))


@pytest.mark.parametrize("name", WHOLE)
def test_sampler_that_gives_every_rank_all_is_not(name: str) -> None:
    refuse_sharded_order(DataLoader(**{"dataset": Rows(), **WHOLE[name]}))


def test_own_batch_samplers_are_known() -> None:
    assert own_batch_sampler(DataLoader(Rows(), batch_sampler=Budget())) == "Budget"
    assert own_batch_sampler(DataLoader(Rows(), batch_size=4, shuffle=True)) is None
    grouped = BatchSampler(SequentialSampler(Rows()), 4, False)
    assert own_batch_sampler(DataLoader(Rows(), sampler=grouped, batch_size=None)) is None
    assert own_batch_sampler(DataLoader(Rows(), batch_size=None)) is None


def train(loader_keywords: dict[str, Any]) -> tuple[int, list[str]]:
    """Trains for one epoch; returns the number of steps and what was told."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("accelerate_lshdp.data.loader_sizes").addHandler(handler)
    try:
        accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([3, 1], strategy="ddp"))
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = DataLoader(Rows(), **loader_keywords)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train()
        for batch in loader:
            accelerator.backward((model(batch["x"]) - batch["labels"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.completed_steps, told
    finally:
        logging.getLogger("accelerate_lshdp.data.loader_sizes").removeHandler(handler)


def train_on_shards() -> None:
    train({"batch_size": 4, "sampler": DistributedSampler(Rows())})


def train_on_hidden_shards() -> None:
    train({"batch_size": 4, "sampler": EveryOther()})


def train_on_own_batches() -> tuple[int, list[str]]:
    return train({"batch_sampler": Budget()})


def test_shards_are_told_before_the_first_step(workers: Callable) -> None:
    run = workers(2).run
    errors = run(train_on_shards, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, "found a DistributedSampler with num_replicas=2", "shuffle=True is enough")
    errors = run(train_on_hidden_shards, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, "do not agree on the samples of the first global batch", "nothing may be divided by rank")


def test_batches_that_the_plan_replaces_are_told(workers: Callable) -> None:
    (steps, told), (others, _) = workers(2).run(train_on_own_batches, timeout=TIMEOUT_SECONDS)
    assert steps == others == ROWS // 4
    assert [
        text for text in told if "replace the batches of Budget" in text and "order of the samples is kept" in text
    ]


# Engines


def test_arguments_of_a_trainer_are_named() -> None:
    with pytest.raises(ValueError, match=r"fsdp_plugin cannot be combined.*take fsdp= out of TrainingArguments"):
        refuse_other_engines({"fsdp_plugin": object(), "cpu": True})
    refuse_other_engines({"fsdp_plugin": None})


def test_fsdp_settings_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    # What the launcher makes of `fsdp_version: 2` and nothing else, as our own files have it.
    for name in ("OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING", "USE_ORIG_PARAMS", "CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(f"FSDP_{name}", "false")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert fsdp_choices_without_effect() == []
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "GPT2Block")
    assert fsdp_choices_without_effect() == ["FSDP_OFFLOAD_PARAMS=true", "FSDP_TRANSFORMER_CLS_TO_WRAP=GPT2Block"]


# Trainers


def _model() -> torch.nn.Module:
    class Regression(torch.nn.Module):
        forwards = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            Regression.forwards += 1
            output = self.linear(x)
            return {"loss": (output - labels).square().mean(), "logits": output}

    return Regression()


def run_trainer(folder: str, arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    """Trains; raises AssertionError if an error came after a forward.

    Args:
        arguments: of `TrainingArguments`.
        changes: attributes to set before on the Trainer, its arguments ("args.NAME") or its model ("model.NAME");
            "plan" is another plan than 3 + 1 samples, "callback" that of a callback, "loader" another Trainer.
    """
    from transformers import TrainingArguments

    from accelerate_lshdp.trainer import LSHDPCallback, LSHDPTrainer

    sharded = changes.pop("loader", None)

    class OwnLoader(LSHDPTrainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(self.train_dataset, batch_size=4, sampler=DistributedSampler(self.train_dataset))

    class OwnSampler(LSHDPTrainer):
        def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
            return DistributedSampler(self.train_dataset)

    trainer_class = {None: LSHDPTrainer, "unprepared": OwnLoader, "sampler": OwnSampler}[sharded]
    model = _model()
    args = TrainingArguments(
        output_dir=folder, report_to=[], use_cpu=True, disable_tqdm=True, max_steps=1, save_strategy="no", **arguments
    )
    plan = changes.pop("plan", Plan.from_batch_sizes([3, 1], strategy="ddp"))
    trainer = trainer_class(model, args, train_dataset=Rows(), plan=plan)
    if "callback" in changes:
        trainer.add_callback(LSHDPCallback(changes.pop("callback")))
    for name, value in changes.items():
        owner, _, attribute = name.rpartition(".")
        setattr({"": trainer, "args": args, "model": model}[owner], attribute, value)
    try:
        trainer.train()
    except Exception:
        assert type(model).forwards == 0
        raise


TOLD: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "dispatch_batches": (
        {"accelerator_config": {"dispatch_batches": True}},
        {},
        (
            "LSHDPTrainer cannot train with LSHDP: found accelerator_config dispatch_batches=True",
            "Set dispatch_batches",
        ),
    ),
    "average_tokens": (
        {"average_tokens_across_devices": False},
        {},
        ("found average_tokens_across_devices=False", "default, True"),
    ),
    "batch_rebalance": (
        {"train_sampling_strategy": "batch_rebalance"},
        {},
        ("found train_sampling_strategy='batch_rebalance'", "Use 'group_by_length'"),
    ),
    "auto_find_batch_size": (
        {"auto_find_batch_size": True},
        {},
        ("found auto_find_batch_size=True, but the batch sizes are the plan's", "accelerate-lshdp profile"),
    ),
    "fsdp": ({"fsdp": "full_shard"}, {}, ("fsdp_plugin cannot be combined", "take fsdp= out of TrainingArguments")),
    "DataParallel": ({}, {"args._n_gpu": 2}, ("found 2 GPUs in one process", "Start one process a GPU")),
    "divided model": ({}, {"model.tp_size": 2}, ("from_pretrained has divided among the ranks", "Load it without")),
    "device_map": (
        {},
        {"model.hf_device_map": {"a": 0, "b": 1}},
        ("spread over the devices 0, 1 (device_map)", "Load it without device_map"),
    ),
    "own loader": (
        {},
        {"loader": "unprepared"},
        ("a DataLoader that was not prepared", "DistributedSampler"),
    ),
    "own sampler": ({}, {"loader": "sampler"}, ("found a DistributedSampler with num_replicas=2",)),
    "best model without its state": (
        {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "no"},
        {"plan": Plan.from_batch_sizes([3, 1], strategy="fsdp")},
        ("found save_only_model=True with load_best_model_at_end=True", "Leave one of them out"),
    ),
    "callback with another plan": (
        {},
        {"callback": Plan.from_batch_sizes([2, 2], strategy="ddp")},
        ("found a plan in LSHDPCallback (strategy ddp, batch sizes [2, 2])", "Give the plan in one place"),
    ),
    "several mistakes": (
        {"average_tokens_across_devices": False, "auto_find_batch_size": True},
        {},
        ("\n  - found average_tokens", "\n  - found auto_find"),
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_trainer_is_told_before_the_first_step(workers: Callable, tmp_path: Any, name: str) -> None:
    arguments, changes, parts = TOLD[name]
    case = (str(tmp_path), arguments, dict(changes))
    errors = workers(2).run(run_trainer, *case, timeout=TIMEOUT_SECONDS, expect_failure=True)
    same_error(errors, *parts)


def test_accelerator_of_another_class_is_told() -> None:
    trainer = SimpleNamespace(args=None, accelerator=SimpleNamespace())
    with pytest.raises(ValueError, match="found an accelerator of class SimpleNamespace, expected .*LSHDPAccelerator"):
        check_arguments(trainer)


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequential": ({"train_sampling_strategy": "sequential"}, {}),
    "equal batches that are dispatched": (
        {"accelerator_config": {"dispatch_batches": True}},
        {"plan": Plan.equal(strategy="ddp")},
    ),
    "equal batches of an own loader": ({}, {"plan": Plan.equal(strategy="ddp"), "loader": "unprepared"}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_arguments_without_mistakes_are_accepted(workers: Callable, tmp_path: Any, name: str) -> None:
    arguments, changes = ACCEPTED[name]
    case = (str(tmp_path), arguments, dict(changes))
    assert workers(2).run(run_trainer, *case, timeout=TIMEOUT_SECONDS) == [None, None]
