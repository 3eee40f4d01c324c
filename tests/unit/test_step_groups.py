# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Groups of optimizers are cut for a step so that its memory is bounded, and are the script's again afterwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_lshdp.documents.step_memory import STEPPED_TOGETHER, stepping_bytes
from accelerate_lshdp.engine import step_groups
from accelerate_lshdp.engine.step_groups import StepGroups


SIZES = (3, 200, 40, 1000, 1, 90)
OPTIMIZERS = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_groups, "STEPPED_TOGETHER", 4 * 256)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def train(kind: type[torch.optim.Optimizer], options: dict[str, Any], *, is_cut: bool) -> dict[str, Any]:
    own = parameters()
    decayed, others = own[::2], own[1::2]
    optimizer = kind([{"params": decayed, "lr": 0.01}, {"params": others}], lr=0.02, foreach=True, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(4)
    for step in range(5):
        for number, parameter in enumerate(own):
            parameter.grad = None if number == step else torch.randn(parameter.shape, generator=generator)
        groups = StepGroups(optimizer, may_bound_memory=is_cut)
        assert (len(optimizer.param_groups) > 2) == is_cut
        optimizer.step()
        groups.restore()
        assert [group["params"] for group in optimizer.param_groups] == [decayed, others]
        scheduler.step()
    return copy.deepcopy({"parameters": own, "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("kind, options", OPTIMIZERS)
def test_steps_in_parts_have_the_same_bits(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    whole, cut = train(kind, options, is_cut=False), train(kind, options, is_cut=True)
    assert whole["optimizer"]["param_groups"] == cut["optimizer"]["param_groups"]
    for expected, found in zip(whole["parameters"], cut["parameters"], strict=True):
        assert torch.equal(expected, found)
    torch.testing.assert_close(cut["optimizer"]["state"], whole["optimizer"]["state"], rtol=0, atol=0)


def test_parts_are_neighbours_and_bounded() -> None:
    own = parameters()
    optimizer = torch.optim.AdamW(own, foreach=True)
    groups = StepGroups(optimizer)
    cut = [[each.numel() for each in group["params"]] for group in optimizer.param_groups]
    assert cut == [[3, 200, 40], [1000], [1, 90]]
    groups.restore()
    assert len(optimizer.param_groups) == 1


def on_device(sizes: Sequence[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]


def test_what_torch_chooses_on_devices_is_cut() -> None:
    optimizer = torch.optim.AdamW(on_device(SIZES))
    StepGroups(optimizer)
    assert [[each.numel() for each in group["params"]] for group in optimizer.param_groups] == [
        [3, 200, 40],
        [1000],
        [1, 90],
    ]


@pytest.mark.parametrize("hidden", [(), (1,)])
def test_parameters_of_hosts_do_not_decide_about_those_of_devices(hidden: tuple[int, ...]) -> None:
    """Ranks of a node step different ones of these, and all of those, which have to get the same bits."""
    device, host = on_device((10, 20)), parameters()[:2]
    mixed = [device[0], host[0], device[1], host[1]]
    for number, parameter in enumerate(mixed):
        parameter.grad = None if number in hidden else torch.zeros_like(parameter)
    optimizer = torch.optim.ASGD(mixed)
    StepGroups(optimizer)
    assert [group["params"] for group in optimizer.param_groups] == [device, host]


def test_groups_that_are_added_after_a_failed_step_stay() -> None:
    optimizer = torch.optim.AdamW(parameters(), foreach=True)
    groups = StepGroups(optimizer)
    added = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [added]})
    groups.restore()
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(SIZES), 1]
    assert optimizer.param_groups[1]["params"] == [added]


class Own(torch.optim.AdamW):
    """May look at all parameters of a group together."""


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {}),  # on CPUs torch steps one parameter at a time
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"foreach": True, "differentiable": True}),
        (Own, {"foreach": True}),
        (torch.optim.LBFGS, {}),
    ],
)
def test_groups_that_stay_whole(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    optimizer = kind(parameters(), **options)
    before = optimizer.param_groups
    StepGroups(optimizer)
    assert optimizer.param_groups is before


def test_predicted_bytes_are_those_of_the_largest_part() -> None:
    assert stepping_bytes(1000, 200) == 1000
    assert stepping_bytes(1e9, 200) == STEPPED_TOGETHER
    assert stepping_bytes(1e9, 1e8) == 1e8
