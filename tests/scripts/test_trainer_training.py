# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Trainer on ranks with unequal batches gives what a plain Trainer gives in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_trials import listening
from torch import nn
from trainer_runs import VARIANTS, arguments, error, full_parameters, train
from transformers import Trainer, set_seed
from workers import WorkerPools

from accelerate_lshdp import LSHDPTrainerMixin, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


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


@pytest.mark.parametrize("sizes", [[(3, 2), (2, 1)], [6, 2]])
def test_a_head_that_ignores_the_number_of_items_is_a_mean_over_the_whole_step(
    workers: WorkerPools, tmp_path: Path, sizes: list[Any]
) -> None:
    """transformers itself adds up the means of the accumulated batches; one large batch tells what is right."""
    alone = {"per_device_train_batch_size": 16}
    [expected] = workers(1).run(train, str(tmp_path), None, "rows", alone, nodes=(1,))

    found = workers(2).run(train, str(tmp_path), sizes, "rows", {"gradient_accumulation_steps": 2}, nodes=(1, 1))

    for rank in found:
        assert error(rank["parameters"], expected["parameters"]) <= PARAMETERS
        assert rank["step"] == expected["step"] == 8


def test_units_in_different_stores_train_as_one_process(workers: WorkerPools, tmp_path: Path) -> None:
    """The layers keep their cache of keys and values out of what is computed twice."""
    placement = ModelPlacement(
        {
            "": UnitPlacement(UnitStore.REPLICATE),
            "transformer.h.0": UnitPlacement(UnitStore.NODE, checkpoint=True),
            "transformer.h.1": UnitPlacement(UnitStore.WORLD, checkpoint=True),
        }
    )
    check(workers, tmp_path, [6, 2], "gpt2", {}, "osdp", "", 53, placement)


def test_a_trainer_places_the_blocks_itself(workers: WorkerPools, tmp_path: Path) -> None:
    [expected] = workers(1).run(train, str(tmp_path), None, "gpt2", {"per_device_train_batch_size": 8}, nodes=(1,))

    options = "gpt2", {}, "osdp"
    found = workers(2).run(
        train, str(tmp_path), [6, 2], *options, nodes=(1, 1), env={"LSDP_PLACEMENT": "auto"}, timeout=90
    )

    assert_same_run(found, expected)
    assert all(set(rank["placed"]) == {"", "transformer.h.0", "transformer.h.1"} for rank in found)


@pytest.mark.parametrize("kind", ["gpt2", "words"])
def test_repeated_sample_of_the_last_batch_does_not_count(workers: WorkerPools, tmp_path: Path, kind: str) -> None:
    check(workers, tmp_path, [(3, 2), (2, 1)], kind, {}, "ddp", "", 49)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name])
def test_what_users_change(workers: WorkerPools, tmp_path: Path, variant: str) -> None:
    options = {"max_steps": 9} if variant == "stream" else {}
    check(workers, tmp_path, [(3, 2), (2, 1)], "gpt2", options, "ddp", variant)


class Unnamed(Trainer):
    """Its batches are tuples, as collators of plain torch give them."""

    def compute_loss(
        self, model: nn.Module, inputs: tuple, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        points, labels = inputs
        return nn.functional.cross_entropy(model(points), labels)


def train_unnamed(folder: str, sizes: list[int] | None, batch: type) -> tuple[dict[str, torch.Tensor], list[float]]:
    """11 samples: with a total of 5 the second of two ranks has none of the last global batch."""
    set_seed(2)
    model = nn.Linear(4, 3).double()
    data = [(torch.randn(4, dtype=torch.float64), index % 3) for index in range(11)]
    more = {"per_device_train_batch_size": 5, "remove_unused_columns": False, "include_num_input_tokens_seen": "no"}
    trainer = type("Own", (Unnamed,) if sizes is None else (LSHDPTrainerMixin, Unnamed), {})(
        model=model,
        args=arguments(folder, logging_steps=1, **more),
        train_dataset=data,
        data_collator=lambda rows: batch((torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows]))),
        **({} if sizes is None else {"plan": Plan.from_batch_sizes(sizes, strategy="ddp")}),
    )
    with listening() as told:
        trainer.train()
    said = any("taken for the mean over samples" in text for text in told)
    assert said == (sizes is not None and trainer.accelerator.is_main_process)
    return full_parameters(trainer), [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("batch", [tuple, list])
def test_batches_without_names_of_which_a_rank_has_no_share(workers: WorkerPools, tmp_path: Path, batch: type) -> None:
    """Of the repeated sample labels were to be taken out by their name."""
    [(expected, losses)] = workers(1).run(train_unnamed, str(tmp_path), None, batch, nodes=(1,))
    assert len(losses) == 6
    for parameters, found in workers(2).run(train_unnamed, str(tmp_path), [3, 2], batch, nodes=(1, 1)):
        assert error(parameters, expected) <= 1e-12
        assert found == pytest.approx(losses, rel=1e-6)
