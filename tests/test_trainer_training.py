# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Trainer on ranks with unequal batches gives what a plain Trainer gives in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_runs import VARIANTS, error, train
from workers import WorkerPools


PARAMETERS, LOSS = 5e-6, 1e-5


def assert_same_run(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in found:
        assert error(rank["parameters"], expected["parameters"]) <= PARAMETERS
        for name in ("step", "max_steps", "epoch", "tokens", "total", "steps_argument"):
            assert rank[name] == expected[name], name
        assert rank["train_loss"] == pytest.approx(expected["train_loss"], rel=LOSS)
        logged, plain = ([line for line in run["log"] if "loss" in line] for run in (rank, expected))
        assert len(logged) == len(plain) > 1
        for ours, theirs in zip(logged, plain, strict=True):
            assert ours["step"] == theirs["step"] and ours["epoch"] == theirs["epoch"]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=LOSS)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert ours["learning_rate"] == theirs["learning_rate"]


def check(
    workers: WorkerPools, folder: Path, sizes: list[Any], kind: str, options: dict[str, Any], *rest: Any
) -> None:
    total = sum(size[0] * size[1] if isinstance(size, tuple) else size for size in sizes)
    alone = {**options, "per_device_train_batch_size": total}
    [expected] = workers(1).run(train, str(folder), None, kind, alone, *rest, nodes=(1,))

    found = workers(2).run(train, str(folder), sizes, kind, options, *rest, nodes=(1, 1))

    assert_same_run(found, expected)


@pytest.mark.parametrize(
    "kind,sizes,steps,strategy",
    [
        ("gpt2", [6, 2], 1, "ddp"),
        ("gpt2", [(3, 2), (2, 1)], 2, "ddp"),
        ("gpt2", [5, 3], 3, "lsdp"),
        ("gpt2", [(2, 2), (2, 2)], 1, "fsdp"),
        ("rows", [6, 2], 1, "lsdp"),
        ("rows", [(3, 2), (2, 1)], 1, "ddp"),
        ("words", [6, 2], 1, "ddp"),
        ("masked", [(1, 2), (3, 2)], 1, "lsdp"),
    ],
)
def test_parameters_and_logs_of_one_process(
    workers: WorkerPools, tmp_path: Path, kind: str, sizes: list[Any], steps: int, strategy: str
) -> None:
    check(workers, tmp_path, sizes, kind, {"gradient_accumulation_steps": steps}, strategy)


@pytest.mark.parametrize("kind", ["gpt2", "words"])
def test_repeated_sample_of_the_last_batch_does_not_count(workers: WorkerPools, tmp_path: Path, kind: str) -> None:
    check(workers, tmp_path, [(3, 2), (2, 1)], kind, {}, "ddp", "", 49)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name])
def test_what_users_change(workers: WorkerPools, tmp_path: Path, variant: str) -> None:
    options = {"max_steps": 9} if variant == "stream" else {}
    check(workers, tmp_path, [(3, 2), (2, 1)], "gpt2", options, "ddp", variant)
