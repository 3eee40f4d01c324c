# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a loop logs has the figures of each rank beside it, in any tracker, once there are new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from exactness import prepared
from training_cases import CASES

from accelerate_lshdp import Plan


FIGURES = {"step_seconds", "samples_per_second", "idle_fraction"} | {
    f"{name}/rank_{rank}" for name in ("compute_seconds", "wait_seconds", "batch_size") for rank in range(2)
}


class Kept(GeneralTracker):
    """A tracker that keeps what it is given."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, Any], int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> list:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.logged.append((values, step, kwargs))


def logged(log_with: str | None, folder: str) -> list:
    case, tracker = CASES["vit"], Kept()
    accelerator, model, optimizer, loader = prepared(
        Plan.from_batch_sizes([3, 1], strategy="ddp"),
        case.model(),
        case.dataset(8, torch.float32),
        log_with=[tracker, *([log_with] if log_with else [])],
        project_dir=folder,
    )
    accelerator.init_trackers("tried")
    accelerator.log({"before": 1.0})
    model.train()
    for number, batch in enumerate(loader):
        accelerator.backward(case.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": 2.0, "idle_fraction": 7.0}, step=number, log_kwargs={"kept": {"color": "red"}})
        accelerator.log({"evaluated": 3.0}, step=number)
    accelerator.end_training()
    return tracker.logged


def test_figures_are_beside_what_is_logged(workers, tmp_path: Path) -> None:
    main, other = workers(2).run(logged, None, str(tmp_path))
    assert other == []  # accelerate logs on the main process
    assert main[0] == ({"before": 1.0}, None, {})
    for number in range(2):
        values, step, given = main[1 + 2 * number]
        assert values.keys() == FIGURES | {"loss"} and (step, given) == (number, {"color": "red"})
        assert (values["loss"], values["idle_fraction"]) == (2.0, 7.0)  # what the script says itself
        assert (values["batch_size/rank_0"], values["batch_size/rank_1"]) == (3.0, 1.0)
        assert values["step_seconds"] > 0 and values["compute_seconds/rank_1"] > 0
        assert main[2 + 2 * number] == ({"evaluated": 3.0}, number, {})  # no step since


def test_tensorboard_shows_them(workers, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    workers(2).run(logged, "tensorboard", str(tmp_path))
    [folder] = {path.parent for path in tmp_path.rglob("events.out.tfevents.*") if "tried" in str(path.parent)}
    events = accumulator.EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) >= FIGURES | {"loss", "evaluated"}
    assert [event.step for event in events.Scalars("wait_seconds/rank_1")] == [0, 1]
