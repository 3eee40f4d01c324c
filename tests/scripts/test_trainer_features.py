# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What else a Trainer does, with unequal batches: evaluation, the best model, lengths, a second training, logs."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
from test_trainer_checkpoints import own_folder
from torch.utils.data import DataLoader
from trainer_runs import Sentences, arguments, collate, full_parameters, make_model, make_trainer
from training_cases import relative_error
from transformers import BertForSequenceClassification, GPT2LMHeadModel, Trainer, TrainerCallback
from workers import WorkerPools

from accelerate_lshdp import LSHDPAccelerator, LSHDPCallback, LSHDPTrainer, Plan
from accelerate_lshdp.runtime.backend import join_launched_ranks


SIZES = [(3, 2), (2, 1)]


def best_model(folder: str, strategy: str) -> dict[str, Any]:
    options = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # the first of the checkpoints
        "save_total_limit": 1,
    }
    trainer = make_trainer(own_folder(folder), [6, 2], "gpt2", options, strategy)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(os.path.join(folder, "final"))
    logged = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    return {
        "best": os.path.basename(trainer.state.best_model_checkpoint),
        "after": after,
        "logged": logged,
        "files": sorted(os.listdir(own_folder(folder))),
        "parameters": full_parameters(trainer),
    }


@pytest.mark.parametrize(
    "strategy", [pytest.param("ddp", marks=pytest.mark.slow), "lsdp", pytest.param("fsdp", marks=pytest.mark.slow)]
)
def test_best_model_is_loaded_on_nodes_of_their_own(workers: WorkerPools, tmp_path: Path, strategy: str) -> None:
    for found in workers(2).run(best_model, str(tmp_path), strategy, nodes=(1, 1)):
        assert found["best"] == "checkpoint-3"
        assert found["after"] == pytest.approx(found["logged"][0], rel=1e-6)
        assert found["logged"][0] > found["logged"][1]
        assert "checkpoint-3" in found["files"] and "checkpoint-6" not in found["files"]

    final = GPT2LMHeadModel.from_pretrained(tmp_path / "final")
    assert all(final.state_dict()[name].equal(value) for name, value in found["parameters"].items())


def best_model_of_one_node(folder: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    for name in ("accelerate_lshdp.trainer", "accelerate_lshdp.trainer.checks"):
        logging.getLogger(name).addHandler(handler)
    options: dict[str, Any] = {"max_steps": 2, "load_best_model_at_end": True, "save_only_model": True}
    for kind in ("eval", "save"):
        options.update({f"{kind}_strategy": "steps", f"{kind}_steps": 1})
    make_trainer(own_folder(folder), [6, 2], "gpt2", options).train()
    return told


def test_best_model_that_is_on_one_node_is_told(workers: WorkerPools, tmp_path: Path) -> None:
    told, _ = workers(2).run(best_model_of_one_node, str(tmp_path), nodes=(1, 1), env={"LSDP_LOSS_WEIGHTING": "none"})
    assert [text for text in told if "is not on every node" in text and "Leave save_only_model out" in text]
    assert [text for text in told if "loss_weighting='none' has no effect in a Trainer" in text]


def evaluations(folder: str, sizes: list[Any] | None, kind: str) -> list[float]:
    batch = {"per_device_eval_batch_size": 5 if sizes else 10, "per_device_train_batch_size": 1 if sizes else 8}
    trainer = make_trainer(folder, sizes, kind, {"max_steps": 2, **batch})
    trainer.eval_dataset = Sentences(20, trainer.eval_dataset.labels)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    prediction = trainer.predict(trainer.eval_dataset)
    assert len(prediction.predictions) == len(prediction.label_ids) == 20
    return [before, trainer.evaluate()["eval_loss"], prediction.metrics["test_loss"]]


def test_evaluation_before_and_after_training(workers: WorkerPools, tmp_path: Path) -> None:
    [expected] = workers(1).run(evaluations, str(tmp_path), None, "rows", nodes=(1,))
    for found in workers(2).run(evaluations, str(tmp_path), [6, 2], "rows", nodes=(1, 1)):
        assert found == pytest.approx(expected, rel=1e-5)


class OwnEvaluation(TrainerCallback):
    """Goes through a loader of the Trainer by itself, with the model left in train mode."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.rows = [len(batch["labels"]) for batch in self.trainer.get_eval_dataloader()]


def evaluate_in_callback(folder: str) -> tuple[int, list[int]]:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_eval_batch_size": 4}
    callback = OwnEvaluation()
    callback.trainer = make_trainer(folder, [6, 2], "gpt2", options)
    callback.trainer.add_callback(callback)
    callback.trainer.train()
    resumed = make_trainer(folder, [6, 2], "gpt2", options)
    resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
    return resumed.state.global_step, callback.rows


def test_loaders_that_callbacks_evaluate_with_are_in_no_checkpoint(workers: WorkerPools, tmp_path: Path) -> None:
    for steps, rows in workers(2).run(evaluate_in_callback, str(tmp_path), nodes=(2,)):
        assert steps == 4 and set(rows) == {4}


def train_twice(folder: str, strategy: str) -> tuple[int, float, float]:
    trainer = make_trainer(folder, SIZES, "rows", {"max_steps": 4, "eval_on_start": True}, strategy)
    first = trainer.train().training_loss
    second = trainer.train().training_loss
    return trainer.state.global_step, first, second


@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_second_training_goes_on_with_the_model(workers: WorkerPools, tmp_path: Path, strategy: str) -> None:
    for steps, first, second in workers(2).run(train_twice, str(tmp_path), strategy, nodes=(1, 1)):
        assert steps == 4 and second < first


class Broken(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ArithmeticError("of the script")


def own_loop_after_training(folder: str, breaks: bool) -> float:
    """The relative error of the gradient of a global batch, in a loop with the Trainer's accelerator."""
    trainer = make_trainer(folder, [3, 1], "words", {"max_steps": 1, "gradient_accumulation_steps": 2})
    if breaks:
        trainer.add_callback(Broken())
    with pytest.raises(ArithmeticError) if breaks else contextlib.nullcontext():
        trainer.train()
    assert trainer.get_total_train_batch_size(trainer.args) == 8
    accelerator, model = trainer.accelerator, trainer.model
    plain = make_model("words")
    plain.load_state_dict(model.state_dict())
    data = Sentences(8, "words")
    model.train().zero_grad()
    for batch in accelerator.prepare(DataLoader(data, batch_size=1, collate_fn=collate)):
        accelerator.backward(model(**batch).loss)
        break
    plain.train()(**collate([data[index] for index in range(4)])).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return relative_error(found, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("breaks", [False, True])
def test_losses_of_a_loop_after_a_training_count_as_in_any_loop(
    workers: WorkerPools, tmp_path: Path, breaks: bool
) -> None:
    """By labels, and each global batch for itself: what the Trainer weights itself ends with its training."""
    assert max(workers(2).run(own_loop_after_training, str(tmp_path), breaks, nodes=(1, 1))) <= 1e-5


def length_groups(folder: str) -> int:
    options = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = make_trainer(folder, SIZES, "gpt2", options)
    trainer.train()
    return trainer._get_train_sampler().batch_size


def test_lengths_are_grouped_for_the_whole_step(workers: WorkerPools, tmp_path: Path) -> None:
    assert workers(2).run(length_groups, str(tmp_path), nodes=(1, 1)) == [16, 16]


def statistics(folder: str) -> tuple[list[dict[str, Any]], list[list[int]]]:
    options = {"max_steps": 30, "logging_steps": 1, "num_train_epochs": 5}
    given = {"model": make_model("gpt2"), "args": arguments(folder, **options), "data_collator": collate}
    trainer = LSHDPTrainer(**given, train_dataset=Sentences(80, "words"), plan=Plan.auto(8))
    trainer.train()
    # What is decided after the last step is in force, and no step was trained with it.
    sizes = [trainer.accelerator.plan.batch_sizes]
    sizes += [list(decision.old) for decision in trainer.accelerator.batch_size_decisions[-1:]]
    return [line for line in trainer.state.log_history if "loss" in line], sizes


def test_logs_tell_where_the_time_goes(workers: WorkerPools, tmp_path: Path) -> None:
    for logs, sizes in workers(2).run(statistics, str(tmp_path), nodes=(1, 1)):
        assert len(logs) == 30
        for line in logs:
            assert line["batch_size/rank_0"] + line["batch_size/rank_1"] == 8
            assert min(line["compute_seconds/rank_0"], line["compute_seconds/rank_1"], line["step_seconds"]) > 0
            assert 0 <= line["idle_fraction"] < 1 and line["samples_per_second"] > 0
        assert [logs[-1]["batch_size/rank_0"], logs[-1]["batch_size/rank_1"]] in sizes


def use_callback(folder: str, late: bool) -> str:
    given = {"args": arguments(folder, max_steps=2), "data_collator": collate, "train_dataset": Sentences(20, "rows")}
    try:
        callback = None if late else LSHDPCallback(Plan.from_batch_sizes([3, 1], strategy="ddp"))
        trainer = Trainer(make_model("rows"), callbacks=[callback] if callback else [], **given)
        if late:
            trainer.add_callback(LSHDPCallback())
        trainer.train()
        return f"{type(trainer.accelerator).__name__} {trainer.accelerator.plan.batch_sizes}"
    finally:
        # Not deleted: a class whose __new__ was set once does without it no more (a trait of CPython).
        accelerate.Accelerator.__new__ = staticmethod(lambda cls, *_, **__: object.__new__(cls))


def test_callback_makes_the_trainer_one_of_ours(workers: WorkerPools, tmp_path: Path) -> None:
    found = workers(2).run(use_callback, str(tmp_path), False, nodes=(1, 1))
    assert found == [f"{LSHDPAccelerator.__name__} [3, 1]"] * 2


def join_late(folder: str) -> tuple[int, int, str]:
    accelerate.PartialState.__init__ = inspect.unwrap(accelerate.PartialState.__init__)  # the import comes late, too
    args = arguments(folder, use_cpu=False, max_steps=1)
    alone = args.world_size
    join_launched_ranks()
    return alone, args.world_size, str(args.parallel_mode)


def test_arguments_made_before_the_callback_learn_of_the_other_ranks(workers: WorkerPools, tmp_path: Path) -> None:
    """As in a launch by accelerate, whose `use_cpu` does not reach the processes."""
    found = workers(2).run(join_late, str(tmp_path), nodes=(1, 1), env={"ACCELERATE_USE_CPU": None})
    assert [after for _, *after in found] == [[2, "ParallelMode.DISTRIBUTED"]] * 2
    assert {alone for alone, *_ in found} <= {1, 2}  # accelerate 1.12 knows them from the beginning


def test_callback_says_that_it_comes_too_late(workers: WorkerPools, tmp_path: Path) -> None:
    for error in workers(2).run(use_callback, str(tmp_path), True, nodes=(1, 1), expect_failure=True):
        assert error.type == "RuntimeError" and "comes too late" in error.message
        assert "callbacks=[LSHDPCallback(plan=...)]" in error.message


def other_total(folder: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    make_trainer(own_folder(folder), [6, 2], "gpt2", options).train()
    make_trainer(own_folder(folder), [6, 3], "gpt2", options).train(resume_from_checkpoint=True)


def test_resuming_with_another_total_is_refused(workers: WorkerPools, tmp_path: Path) -> None:
    for error in workers(2).run(other_total, str(tmp_path), nodes=(1, 1), expect_failure=True):
        assert "saved with global batches of 8 samples" in error.message and "this run has 9" in error.message


def other_accumulation(folder: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    make_trainer(own_folder(folder), [6, 2], "gpt2", options).train()
    options["gradient_accumulation_steps"] = 2
    make_trainer(own_folder(folder), [6, 2], "gpt2", options).train(resume_from_checkpoint=True)


def test_resuming_with_other_accumulation_is_refused(workers: WorkerPools, tmp_path: Path) -> None:
    for error in workers(2).run(other_accumulation, str(tmp_path), nodes=(1, 1), expect_failure=True):
        assert "saved with global batches of 8 samples" in error.message and "this run has 16" in error.message


def train_equally(folder: str, resume: bool) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "per_device_train_batch_size": 4}
    given = {"model": make_model("gpt2"), "args": arguments(folder, **options), "data_collator": collate}
    trainer = LSHDPTrainer(**given, train_dataset=Sentences(53, "words"), plan=Plan.equal(strategy="ddp"))
    trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2") if resume else None)


def test_resuming_equal_batches_on_other_ranks_is_refused(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(train_equally, str(tmp_path), False, nodes=(2,))
    (error,) = workers(1).run(train_equally, str(tmp_path), True, nodes=(1,), expect_failure=True)
    assert "saved with global batches of 8 samples" in error.message and "this run has 4" in error.message


def trap(folder: str) -> tuple[bool, float]:
    """A classification head on two ranks: whether the Trainer still takes it for one that uses the count, its loss."""
    trainer = make_trainer(folder, [3, 1], "rows", {"max_steps": 1, "logging_steps": 1})
    assert isinstance(trainer.model, BertForSequenceClassification) and trainer.model_accepts_loss_kwargs
    trainer.train()
    return trainer.model_accepts_loss_kwargs, trainer.state.log_history[0]["loss"]


def test_doubled_loss_of_classification_heads_is_mended(workers: WorkerPools, tmp_path: Path) -> None:
    for accepts, loss in workers(2).run(trap, str(tmp_path), nodes=(1, 1)):
        assert not accepts and loss == pytest.approx(0.69, abs=0.1)  # of two classes; doubled it would be 1.39
