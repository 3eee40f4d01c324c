# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Trainer on the emulated device, and on it beside processors, trains as transformers' does in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_cases import MIXIN, SHIM, TOTAL, Run, compare, edited_script, outcome_of, start_alone
from workers import WorkerPool

from accelerate_lshdp import Plan


pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(300),  # the first test builds the device
]
SCRIPT = "causal_lm"
#: Of a rank's environment what must not reach the oracle, a plain `python script.py`.
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def folder_of(parent: Path, name: str, nodes: int) -> Path:
    folder = parent / name
    for node in range(nodes):
        (folder / f"node{node}").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("way", "devices"),
    [
        (MIXIN, ("emulated", "cpu")),
        pytest.param(MIXIN, (), marks=pytest.mark.slow),
        pytest.param(SHIM, ("cpu", "emulated"), marks=pytest.mark.slow),
        pytest.param(SHIM, (), marks=pytest.mark.slow),
    ],
)
def test_a_trainer_trains_as_in_one_process(
    on_device: Callable[..., list], tmp_path: Path, way: str, devices: tuple[str, ...]
) -> None:
    pool = WorkerPool(1)
    alone = Run(SCRIPT, str(folder_of(tmp_path, "alone", 1)), TOTAL)
    pool.run(start_alone, alone, env=dict.fromkeys(LAUNCHED))
    pool.close()
    folder = folder_of(tmp_path, "ranks", 2)
    plan = folder / "plan.json"
    Plan.from_batch_sizes((7, 5), strategy="lsdp").save(plan)
    if way != SHIM:
        edited_script(SCRIPT, way, str(plan), folder)
    run = Run(SCRIPT, str(folder), 4, way=way, plan=str(plan))
    races = on_device("accelerator_training", "trained_by_script", run, devices, ranks=2, nodes=(1, 1), timeout=150)
    assert races == [[], []]
    compare(outcome_of(run), outcome_of(alone))
