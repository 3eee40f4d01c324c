# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Parameters that a script changes in place between an evaluation and the next training step are those it trains.

Optimizers with other weights for evaluation (schedule-free ones) and swapped averages of weights do so.
"""

from __future__ import annotations

import pytest
import torch
from test_unusual_scripts import CASE, start, values
from training_cases import collate, relative_error


def train_halved(strategy: str, evaluates: bool) -> dict:
    accelerator, model, optimizer, loader = start(strategy)
    if evaluates:
        model.eval()
        with torch.no_grad():
            CASE.loss(model, collate([CASE.dataset(9, torch.float64)[i] for i in (0, 1)]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.train()
    for batch in loader:
        accelerator.backward(CASE.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(
    "strategy",
    ["collectives", "zero2", *(pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("ddp", "fsdp"))],
)
def test_an_evaluation_leaves_no_old_parameters_to_train(workers, strategy):
    with_evaluation = workers(2).run(train_halved, strategy, True)
    without = workers(2).run(train_halved, strategy, False)
    for changed, expected in zip(with_evaluation, without, strict=True):
        assert relative_error(changed, expected) <= 1e-12
