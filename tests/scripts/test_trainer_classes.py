# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainers of a script's own: their methods are called first, and what they call by super() is LSHDP's."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import accelerate
import torch
from trainer_runs import Sentences, arguments, collate, make_model
from transformers import Trainer
from workers import WorkerPools

from accelerate_lshdp import LSHDPAccelerator, LSHDPTrainerMixin, Plan


class OwnTrainer(LSHDPTrainerMixin, Trainer):
    """Keeps a number in checkpoints, and chooses the checkpoint that it resumes from."""

    resumes_from: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.number, self.called = 0, []

    def train(self) -> Any:
        return super().train(resume_from_checkpoint=self.resumes_from)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(self.number, Path(output_dir, "number.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.number = torch.load(Path(checkpoint, "number.pt"))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.called.append("_save_rng_state")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, *, extra: int = 0) -> None:
        super().save_model(output_dir, _internal_call)
        self.called.append(f"save_model {extra}")


def make(folder: str) -> OwnTrainer:
    given = {"data_collator": collate, "train_dataset": Sentences(40, "rows")}
    args = arguments(folder, max_steps=4, save_strategy="steps", save_steps=2)
    return OwnTrainer(make_model("rows"), args=args, plan=Plan.from_batch_sizes([3, 1], strategy="ddp"), **given)


def resume(folder: str) -> list[Any]:
    whole = make(f"{folder}/whole")
    whole.number = 7
    whole.train()
    whole.save_model(f"{folder}/final", extra=3)
    rest = make(f"{folder}/rest")
    rest.resumes_from = f"{folder}/whole/checkpoint-2"
    rest.train()
    same = zip(whole.model.parameters(), rest.model.parameters(), strict=True)
    return [rest.number, {*whole.called}, all(torch.equal(one, other) for one, other in same)]


def test_own_methods_are_called_and_resume_bit_by_bit(workers: WorkerPools, tmp_path: Path) -> None:
    for number, called, same in workers(2).run(resume, str(tmp_path), nodes=(2,)):
        assert number == 7 and same
        assert called == {"_save_rng_state", "save_model 0", "save_model 3"}


class Loud(Trainer):
    accelerator = None  # hides the attribute of Trainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.told: list[dict[str, float]] = []
        super().__init__(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        self.told.append(logs)


def derive_again(folder: str) -> list[Any]:
    """A class that a script derives from that of a Trainer, and one that gets its accelerator by assignment."""
    given = {"data_collator": collate, "train_dataset": Sentences(20, "rows")}
    plan = Plan.from_batch_sizes([4], strategy="ddp")
    first = Loud(make_model("rows"), args=arguments(f"{folder}/first", max_steps=2), **given)
    stock = type(first)
    first.accelerator = LSHDPAccelerator(plan=plan)
    louder = type("Louder", (type(first),), {})
    second = louder(make_model("rows"), args=arguments(f"{folder}/second", max_steps=2), **given)
    second.accelerator = first.accelerator
    for trainer in (first, second):
        trainer.train()
    names = [type(trainer).__name__ for trainer in (first, second)]
    logged = ["batch_size/rank_0" in logs for logs in (*first.told[:1], *second.told[:1])]
    found = [names, isinstance(second, louder), logged]
    first.accelerator = accelerate.Accelerator()
    return [*found, stock is Loud and type(first) is Loud]


def test_classes_derived_from_a_changed_one_keep_their_methods(workers: WorkerPools, tmp_path: Path) -> None:
    [[names, is_louder, logged, given_back]] = workers(1).run(derive_again, str(tmp_path), nodes=(1,))
    assert names == ["Loud", "Louder"] and is_louder and logged == [True, True] and given_back


def forget_class(folder: str) -> bool:
    own = type("OfACell", (Trainer,), {})
    given = {"data_collator": collate, "train_dataset": Sentences(20, "rows")}
    trainer = own(make_model("rows"), args=arguments(folder, max_steps=1), **given)
    trainer.accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"))
    gone = weakref.ref(own)
    del own, trainer
    gc.collect()
    return gone() is None


def test_a_class_of_a_notebook_is_freed(workers: WorkerPools, tmp_path: Path) -> None:
    assert workers(1).run(forget_class, str(tmp_path), nodes=(1,)) == [True]
