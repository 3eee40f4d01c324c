# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Records, at every optimizer step of a process, the learning rates before it and all trained parameters around it.

It knows nothing of accelerators, models or names: torch calls it around the step of every optimizer. Parameters are
listed in the order of the optimizer's groups, which is the script's, and shards are gathered, so all ranks have to
step together; that is what the suite is about. With ``WILD_RATES`` the learning rates of an earlier recording are set
before each step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Recording:
    """What one process has recorded; written after each step, since scripts end in many ways."""

    def __init__(self, folder: Path, forced: list[list[float]] | None) -> None:
        rank = os.environ.get("RANK", "0")
        self._rates_file = folder / f"rates-{rank}.json"
        self._parameters_folder = folder / "parameters"
        self._is_first = rank == "0"
        self._forced = forced
        self._rates: list[list[float]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = len(self._rates)
        if self._forced is not None and step < len(self._forced):
            for group, rate in zip(optimizer.param_groups, self._forced[step], strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        if step == 0:
            self._save(optimizer)
        self._rates.append([float(group["lr"]) for group in optimizer.param_groups])
        self._rates_file.write_text(json.dumps(self._rates))

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._save(optimizer)

    def _save(self, optimizer: torch.optim.Optimizer) -> None:
        """Writes the parameters under the number of steps made; on all ranks, since shards are gathered."""
        whole = [_whole(p) for group in optimizer.param_groups for p in group["params"]]
        if self._is_first:
            self._parameters_folder.mkdir(exist_ok=True)
            flat = torch.cat([p.reshape(-1).to("cpu", torch.float64) for p in whole]) if whole else torch.zeros(0)
            torch.save(flat, self._parameters_folder / f"{len(self._rates):04d}.pt")


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    data = parameter.detach()
    return data.full_tensor() if hasattr(data, "full_tensor") else data


def install() -> None:
    """Records every optimizer of this process in the folder that ``WILD_RECORD`` names."""
    folder = Path(os.environ["WILD_RECORD"])
    rates = os.environ.get("WILD_RATES")
    recording = Recording(folder, json.loads(Path(rates).read_text()) if rates else None)
    register_optimizer_step_pre_hook(recording.before)
    register_optimizer_step_post_hook(recording.after)
