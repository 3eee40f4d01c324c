# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Trainer that is interrupted goes on as if it had not been, also under another plan and on nodes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_trainer_training import assert_same_run
from trainer_runs import make_trainer, report, train
from transformers import TrainerCallback
from workers import WorkerPools


class Stop(TrainerCallback):
    """Ends a run in the middle of the second epoch, right after it has saved."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 9


def own_folder(folder: str) -> str:
    """Nodes share no file system."""
    return os.path.join(folder, f"node{os.environ['GROUP_RANK']}")


def interrupt(folder: str, sizes: list[Any], kind: str, options: dict[str, Any], strategy: str) -> list[str]:
    """Returns what is in this node's folder."""
    options = {**options, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(own_folder(folder), sizes, kind, options, strategy)
    trainer.add_callback(Stop())
    trainer.train()
    return sorted(os.listdir(own_folder(folder)))


def resume(folder: str, *given: Any) -> dict[str, Any]:
    return report(make_trainer(own_folder(folder), *given), resume=True)


@pytest.mark.parametrize("changed", [[(2, 3), (2, 1)], [(1, 4), (2, 2)]], ids=["same plan", "another plan"])
def test_goes_on_in_mid_epoch(workers: WorkerPools, tmp_path: Path, changed: list[Any]) -> None:
    sizes, options = [(2, 3), (2, 1)], {"logging_steps": 3}
    alone = {**options, "per_device_train_batch_size": 8}
    [expected] = workers(1).run(train, str(tmp_path), None, "gpt2", alone, nodes=(1,))

    saved = workers(2).run(
        interrupt, str(tmp_path), sizes, "gpt2", {**options, "save_total_limit": 2}, "ddp", nodes=(1, 1)
    )
    found = workers(2).run(resume, str(tmp_path), changed, "gpt2", options, "lsdp", nodes=(1, 1))

    assert saved == [["checkpoint-6", "checkpoint-9"]] * 2
    for rank in found:
        rank["train_loss"] = expected["train_loss"]  # of the resumed part alone
    assert_same_run(found, expected)
