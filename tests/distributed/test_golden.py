# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Losses and gradient norms of 20 steps are those that were recorded: beside the oracles, which are computed anew.

An error that oracle and package have in common, or that a new version of a library brings, shows here only.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from golden.record import FILE, OPTIONS, STEPS, TOLERANCE, TOTAL, trajectory
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))["trajectories"]


def require_golden(found: dict[str, list[float]], model: str) -> None:
    for name, expected in GOLDEN[model].items():
        assert len(expected) == STEPS
        assert found[name] == pytest.approx(expected, rel=TOLERANCE, abs=0), name


def train(model_name: str, strategy: str) -> dict[str, list[float]]:
    case = CASES[model_name]
    plan = Plan.from_batch_sizes((3, 1), strategy=strategy)
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting=case.weighting))
    model = case.model().double()
    optimizer = make_optimizer(model, OPTIONS["lr"], OPTIONS["weight_decay"])
    loader = DataLoader(case.dataset(STEPS * TOTAL, torch.float64), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses, norms = [], []
    for batch in loader:
        total, count = case.loss_sum(model, batch)
        accelerator.backward(total / count)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), OPTIONS["max_grad_norm"]).item())
        optimizer.step()
        optimizer.zero_grad()
        sums = torch.tensor([total.item(), count], dtype=torch.float64)
        dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
    return {"losses": losses, "gradient_norms": norms}


@pytest.mark.parametrize("model", CASES)
def test_one_process_gives_the_recorded_trajectory(model):
    require_golden(trajectory(model), model)


@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp"])
@pytest.mark.parametrize("model", CASES)
def test_unequal_ranks_give_the_recorded_trajectory(workers, model, strategy):
    for found in workers(2).run(train, model, strategy, nodes=(2,)):
        require_golden(found, model)
