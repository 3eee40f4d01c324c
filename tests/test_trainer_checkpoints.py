# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Trainer that is interrupted goes on as if it had not been, also under another plan and on nodes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_trainer_training import assert_same_run
from trainer_runs import train
from workers import WorkerPools

from accelerate_lshdp import LSHDPTrainer


class StoppedTrainer(LSHDPTrainer):
    """Ends in the middle of the second epoch, right after it has saved."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.state.global_step == 9:
            self.control.should_training_stop = True


def interrupt(folder: str, sizes: list[Any], kind: str, options: dict[str, Any], strategy: str) -> list[str]:
    """Every node has its own folder; returns what is in this one's."""
    own = os.path.join(folder, f"node{os.environ['GROUP_RANK']}")
    options = {**options, "per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 3}
    train(own, sizes, kind, options, strategy=strategy, trainer_class=StoppedTrainer)
    return sorted(os.listdir(own))


def resume(folder: str, sizes: list[Any], kind: str, options: dict[str, Any], strategy: str) -> dict[str, Any]:
    own = os.path.join(folder, f"node{os.environ['GROUP_RANK']}")
    return train(own, sizes, kind, {**options, "per_device_train_batch_size": 1}, strategy=strategy, resume=True)


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
