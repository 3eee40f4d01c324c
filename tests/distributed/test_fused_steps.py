# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Fused optimizer steps on CPUs: where they are chosen, and that they compute the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.engine.fused_steps import fuse_steps


MAKERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, weight_decay=0.1),
}


def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        model(torch.randn(6, 5, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("name", MAKERS)
def test_fused_steps_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    other = copy.deepcopy(model)
    plain, fused = MAKERS[name](model.parameters()), MAKERS[name](other.parameters())
    assert fuse_steps(fused) == 1 and fused.param_groups[0]["fused"] is True
    for expected, found in zip(train(plain, model), train(fused, other), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Own(torch.optim.AdamW):
    """May compute something else."""


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, fused=False),
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
        lambda parameters: torch.optim.RMSprop(parameters),
        Own,
    ],
)
def test_what_the_script_chose_stays(make) -> None:
    optimizer = make(nn.Linear(2, 2).parameters())
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert fuse_steps(optimizer) == 0
    assert before == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def test_parameters_of_other_dtypes_stay() -> None:
    assert fuse_steps(torch.optim.AdamW(nn.Linear(2, 2).half().parameters())) == 0


def step_on_shards(name: str) -> bool:
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="fsdp"))
    model = nn.Linear(2, 2).double()
    optimizer, model = accelerator.prepare(MAKERS[name](model.parameters()), model)
    accelerator.backward(model(torch.ones(1, 2, dtype=torch.float64)).sum())
    optimizer.step()
    return bool(optimizer.param_groups[0]["fused"])


@pytest.mark.parametrize(("name", "is_fused"), [("adam", True), ("adamw", True), ("sgd", False)])
def test_shards_are_stepped_by_kernels_that_take_them(workers, name: str, is_fused: bool) -> None:
    assert workers(2).run(step_on_shards, name) == [is_fused] * 2


def test_prepare_fuses_on_cpus() -> None:
    accelerator = LSHDPAccelerator(cpu=True)
    model = nn.Linear(2, 2)
    _, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert optimizer.param_groups[0]["fused"] is True
