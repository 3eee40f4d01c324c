# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``placement="auto"``: measured when a model is prepared, the same on all ranks, exact, and nothing disturbed."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from exactness import LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, full
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from training_cases import CASES, collate, make_optimizer, reference_run, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.accelerator import automatic_placement
from accelerate_lshdp.documents.host_memory import MOST_FREE_IN_HEAP
from accelerate_lshdp.profiling.rates import Rates


TOTAL, STEPS = 12, 3


def use_limit(megabytes: float | None, rates: Rates) -> None:
    """Replaces what is measured of this machine: memory that may be used beside the process, and speeds."""
    automatic_placement.measure_rates = lambda *_: rates
    automatic_placement.process_bytes = lambda *_: 0
    if megabytes is not None:

        class Meter:
            def default_limit(self, local_ranks: int) -> int:
                return int(megabytes * 1e6)

        automatic_placement.meter_of = lambda device: Meter()


def train(model_name: str, megabytes: float | None, sizes: Any = "auto") -> dict[str, Any]:
    measured = {name: getattr(automatic_placement, name) for name in ("measure_rates", "process_bytes", "meter_of")}
    use_limit(megabytes, Rates(1e9, 1e9))
    try:
        return _train(model_name, sizes)
    finally:
        vars(automatic_placement).update(measured)


def _train(model_name: str, sizes: Any) -> dict[str, Any]:
    case = CASES[model_name]
    set_seed(3)
    total = {"total_batch_size": TOTAL} if sizes == "auto" else {}
    accelerator = LSHDPAccelerator(
        batch_sizes=sizes, placement="auto", lsdp_plugin=LSDPPlugin(loss_weighting=case.weighting), **total
    )
    model = case.model().double()
    optimizer = make_optimizer(model, LEARNING_RATE, WEIGHT_DECAY)
    loader = DataLoader(case.dataset(TOTAL * STEPS, torch.float64), batch_size=4, collate_fn=collate)
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    undisturbed = drawn[0] == random.getstate() and drawn[1] == np.random.get_state()[1].tolist()
    undisturbed = undisturbed and torch.equal(drawn[2], torch.get_rng_state())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(case.loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "parameters": {name: full(parameter) for name, parameter in model.named_parameters()},
        "placement": accelerator.plan.placement.to_dict(),
        "strategy": str(accelerator.strategy),
        "micro_batches": accelerator.plan.micro_batches,
        "undisturbed": undisturbed,
        "steps": accelerator.completed_steps,
    }


def check(results: list[dict[str, Any]], model_name: str) -> dict[str, Any]:
    case = CASES[model_name]
    batches = [list(range(step * TOTAL, (step + 1) * TOTAL)) for step in range(STEPS)]
    expected = reference_run(
        model_name,
        torch.float64,
        batches,
        weighting=case.weighting,
        steps=STEPS,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
    )
    for result in results:
        assert result["strategy"] == "osdp" and result["undisturbed"] and result["steps"] == STEPS
        assert result["placement"] == results[0]["placement"]
        assert result["micro_batches"] == results[0]["micro_batches"]
        assert relative_error(result["parameters"], expected.parameters) <= 1e-12
    return results[0]


def stores(result: dict[str, Any]) -> set[str]:
    return {unit["store"] for unit in result["placement"]["units"].values()}


@pytest.mark.parametrize("model", ["gpt2", "vit"])
def test_three_lines_train_exactly_on_uneven_nodes(workers, model: str) -> None:
    result = check(workers(3).run(train, model, None, nodes=(1, 2), timeout=90), model)
    assert sum(size * steps for size, steps in result["micro_batches"]) == TOTAL


def test_little_memory_is_kept_and_exact(workers) -> None:
    ample = check(workers(2).run(train, "gpt2", None, nodes=(1, 1), timeout=90), "gpt2")
    assert not ample["placement"]["units"]["transformer.h.0"]["checkpoint"]
    assert ample["micro_batches"] == [(6, 1), (6, 1)]
    # 28 thousand parameters of 40 bytes (fp64; with gradients that are added to others), whole on each rank, are 1.1
    # MB without activations; beside them the C library keeps 24 MiB. Of the limit a tenth is left free.
    limit = round((1.6 + MOST_FREE_IN_HEAP / 1e6) / 0.9, 1)
    little = check(workers(2).run(train, "gpt2", limit, nodes=(1, 1), timeout=90), "gpt2")
    assert little["placement"]["units"] != ample["placement"]["units"]
    assert stores(little) != stores(ample) or any(unit["checkpoint"] for unit in little["placement"]["units"].values())
    assert little["placement"]["memory_limit_bytes"] == [int(limit * 1e6 * 0.9)] * 2


def test_given_batch_sizes_stay(workers) -> None:
    result = check(workers(2).run(train, "vit", None, [8, 4], nodes=(1, 1), timeout=90), "vit")
    assert result["micro_batches"] == [(8, 1), (4, 1)]


class Wide(nn.Module):
    """Blocks of two large weights, of which the first can be in slices, and the second one has too few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16384), nn.Tanh(), nn.Linear(16384, 16)) for _ in range(4)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def train_wide(accelerator: LSHDPAccelerator | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Two steps of SGD over 8 samples; without an accelerator in one process, without a plan."""
    model = Wide().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(7)
    data = [{"input": torch.randn(16, generator=generator, dtype=torch.float64)} for _ in range(16)]
    loader = DataLoader(data, batch_size=8 if accelerator is None else 4)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with contextlib.nullcontext() if accelerator is None else accelerator.accumulate(model):
            loss = model(batch["input"]).square().mean()
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    parameters = {name: full(parameter) for name, parameter in model.named_parameters()}
    return parameters, {} if accelerator is None else accelerator.plan.placement.to_dict()


def train_wide_with_little_memory(megabytes: float) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    measured = {name: getattr(automatic_placement, name) for name in ("measure_rates", "process_bytes", "meter_of")}
    use_limit(megabytes, Rates(1e9, 1e9))
    try:
        return train_wide(LSHDPAccelerator(batch_sizes=[4, 4], placement="auto"))
    finally:
        vars(automatic_placement).update(measured)


def test_large_weights_are_in_slices_where_memory_is_short(workers) -> None:
    expected, _ = train_wide(None)
    # Shards of 2.1 million parameters are 34 MB, the C library keeps 42 MB, and a tenth of the limit is left free. The
    # rest is enough for gathered units in slices, and not for whole ones.
    results = workers(2).run(train_wide_with_little_memory, 104.0, nodes=(1, 1), timeout=90)
    for parameters, placement in results:
        assert relative_error(parameters, expected) <= 1e-12
        assert placement == results[0][1]
    assert any(unit["slices"] > 1 for unit in placement["units"].values()), placement


def prepare_loader_first(loader_workers: int) -> tuple[list[str], int]:
    """Without a plan, as a script that names no number does it; returns the units and the samples of a micro-batch."""
    accelerator = LSHDPAccelerator(placement="auto")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    data = [{"input": torch.ones(4) * index} for index in range(16)]
    loader = accelerator.prepare(DataLoader(data, batch_size=2, num_workers=loader_workers))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for batch in loader:
        accelerator.backward(model(batch["input"]).mean())
        optimizer.step()
        optimizer.zero_grad()
    return list(accelerator.plan.placement.to_dict()["units"]), len(batch["input"])


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_the_loader_may_be_prepared_before_the_model(workers, loader_workers: int) -> None:
    found = workers(2).run(prepare_loader_first, loader_workers, nodes=(1, 1), timeout=90)
    assert found[0] == found[1] == (["0", "1", ""], 2)


def ask_on_one_rank() -> None:
    asked = os.environ["RANK"] == "1"
    LSHDPAccelerator(plan=Plan.equal(strategy="osdp"), placement="auto" if asked else None)


def test_ranks_that_disagree_are_one_error_on_all(workers) -> None:
    errors = workers(2).run(ask_on_one_rank, nodes=(1, 1), timeout=60, expect_failure=True)
    assert all(error is not None and "ranks" in error.message for error in errors), errors
    assert all("placement found by the run" in error.message for error in errors), errors


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.ones(4)}] * 8)


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * x.sum().item()


def refused(kind: str) -> None:
    plan = Plan.equal(strategy="lsdp") if kind == "another strategy" else None
    placement = "automatic" if kind == "another word" else "auto"
    options = LSDPPlugin(communication_dtype="int8" if kind == "a format between nodes" else None)
    accelerator = LSHDPAccelerator(plan=plan, placement=placement, lsdp_plugin=options)
    model = ReadsValues() if kind == "a forward that reads values" else nn.Linear(4, 4)
    data = Stream() if kind == "a stream" else [{"x": torch.ones(4)}] * 8
    if kind == "samples that are not numbered":
        data = {f"sample {place}": {"x": torch.ones(4)} for place in range(8)}
    if kind == "another kind of input":
        data = [{"y": torch.ones(3)}] * 8
    loader = DataLoader(data, batch_size=2)
    if kind == "no loader":
        accelerator.prepare(model)
    elif kind == "prepare_model":
        accelerator.prepare_model(model)
    accelerator.prepare(model, loader)


REFUSED = {
    "a stream": "found a stream of samples",
    "no loader": "found a model without a loader",
    "prepare_model": "found prepare_model",
    "a forward that reads values": "It was called with the entries ['x'] of a batch: the forward of Reads",
    "another kind of input": "It was called with the first entry of a batch: the forward of Linear cannot",
    "samples that are not numbered": "KeyError",
    "a format between nodes": "found communication_dtype='int8'",
    "another strategy": 'the plan says strategy "lsdp"',
    "another word": "found placement='automatic'",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_known_is_one_error_on_all_ranks(workers, kind: str) -> None:
    errors = workers(2).run(refused, kind, nodes=(1, 1), timeout=60, expect_failure=True)
    assert all(error is not None and REFUSED[kind] in error.message for error in errors), errors
