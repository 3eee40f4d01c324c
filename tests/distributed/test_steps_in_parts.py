# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Optimizers whose groups are cut for a step, beside scripts that look at the groups while it is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from exactness import full
from torch import nn

from accelerate_lshdp import LSHDPAccelerator, Plan


SCRIPTS = ("plain", "hook", "closure")
STEPS = 3
LEARNING_RATE = 1e-2


def train(
    script: str, model: nn.Module, optimizer: Any, own: torch.optim.AdamW, backward: Callable[[torch.Tensor], None]
) -> list[int]:
    """Makes some steps; returns how many parts each had.

    Args:
        script: its hook, or closure, gives the one group another learning rate in each step.
        model: prepared or not.
        optimizer: prepared or not.
        own: the optimizer without what `prepare` puts around it.
        backward: of a loss.
    """
    made = 0

    def divide_rate(*_: object) -> None:
        (group,) = own.param_groups
        group["lr"] = LEARNING_RATE / (1 + made)

    def loss() -> torch.Tensor:
        return model(torch.ones(2, 5, dtype=torch.float64)).square().sum()

    def closure() -> torch.Tensor:
        divide_rate()
        found = loss()
        backward(found)
        return found

    if script == "hook":
        own.register_step_pre_hook(divide_rate)
    counts = []
    for _ in range(STEPS):
        # torch's foreach AdamW takes square roots once for each group.
        with mock.patch("torch._foreach_sqrt", wraps=torch._foreach_sqrt) as roots:
            if script == "closure":
                optimizer.step(closure)
            else:
                backward(loss())
                optimizer.step()
        counts.append(roots.call_count)
        optimizer.zero_grad()
        made += 1
    return counts


def train_both(strategy: str, script: str) -> dict[str, Any]:
    """The script under a strategy and in one process: by how much they differ, and the parts of their steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    expected = copy.deepcopy(model)
    own, reference = (torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, foreach=True) for m in (model, expected))
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy=strategy), cpu=True)
    model, optimizer = accelerator.prepare(model, own)
    with mock.patch("accelerate_lshdp.engine.step_groups.STEPPED_TOGETHER", 8 * 20):
        parts = train(script, model, optimizer, own, accelerator.backward)
    whole = train(script, expected, reference, reference, torch.Tensor.backward)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    error = max((full(found) - wanted).abs().max().item() for found, wanted in pairs)
    return {"error": error, "parts": parts, "whole": whole}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_scripts_see_their_own_groups(workers, strategy: str, script: str) -> None:
    # Shards are smaller, and those of the second rank have a row less of the last layer.
    cut = {"ddp": (6, 6), "fsdp": (5, 4)}[strategy] if script == "plain" else (1, 1)
    for parts, found in zip(cut, workers(2).run(train_both, strategy, script), strict=True):
        assert found["error"] < 1e-12
        assert found["whole"] == [1] * STEPS
        assert found["parts"] == [parts] * STEPS
