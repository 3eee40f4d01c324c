# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A micro-batch that counts nothing adds an exact 0 to the gradients, whatever its loss and its backward are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness import full
from strategy_cells import SIZES_OF_4, cells
from torch import nn
from torch.utils.data import DataLoader
from training_cases import Samples, collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


FEATURES = 6
#: Samples without a masked position: all of a rank's micro-batch in some global batches of 4.
WITHOUT_MASK = frozenset({3, 4, 5, 8, 9, 10, 11})
PLACES = [("ddp", (1, 1)), ("collectives", (1, 1)), ("collectives", (2,)), ("lsdp", (2,)), ("fsdp", (2,))]


def masked_samples(size: int) -> Samples:
    def make(index: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        mask = torch.rand(5, generator=generator) < 0.5
        mask[0] = True
        return {
            "x": torch.randn(5, FEATURES, generator=generator, dtype=torch.float64),
            "mask": mask & (index not in WITHOUT_MASK),
        }

    return Samples(size, make)


def small_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Linear(FEATURES, 1)).double()


class Scaled(nn.Module):
    """A model with a parameter that is one number, which FSDP2 leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()
        self.scale = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def masked_mean(model: nn.Module, batch: dict, kind: str) -> torch.Tensor:
    losses = model(batch["x"])[..., 0].square()
    if kind == "logarithm":  # of the mean: -inf, and NaN in its backward, for a mask without an entry
        losses = losses + 0 * (batch["mask"].sum().double().log() * losses)
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def count_mask(batch: dict) -> int:
    return int(batch["mask"].sum())


def placing_of(strategy: str) -> dict:
    return {"strategy": "lsdp", "intra_node": "collectives"} if strategy == "collectives" else {"strategy": strategy}


def train_on_masks(strategy: str, sizes: list, kind: str, make_model: Callable[[], nn.Module] = small_model) -> dict:
    plan = Plan.from_batch_sizes(sizes, **placing_of(strategy))
    plugin = LSDPPlugin(loss_weighting="tokens", token_counter=count_mask)
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=plugin)
    model = make_model()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loader = DataLoader(masked_samples(13), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(masked_mean(model, batch, kind))
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def one_process(make_model: Callable[[], nn.Module] = small_model) -> dict:
    model, data = make_model(), masked_samples(13)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for start in (0, 4, 8, 12):
        masked_mean(model, collate([data[index] for index in range(start, min(start + 4, 13))]), "mean").backward()
        if start == 8:  # no masked entry anywhere
            for parameter in model.parameters():
                parameter.grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@cells(*PLACES)
def test_a_mean_over_an_empty_mask_is_an_exact_zero(workers, strategy, nodes):
    check_against_one_process(workers(sum(nodes)), strategy, nodes, SIZES_OF_4[sum(nodes)])


@pytest.mark.parametrize(("strategy", "nodes"), PLACES)
def test_a_mean_over_an_empty_mask_is_an_exact_zero_among_accumulated_ones(workers, strategy, nodes):
    check_against_one_process(workers(2), strategy, nodes, [(1, 2), (1, 2)])


def check_against_one_process(pool, strategy: str, nodes: tuple[int, ...], sizes: list) -> None:
    kind = "logarithm" if strategy in ("ddp", "lsdp") else "mean"
    for parameters in pool.run(train_on_masks, strategy, sizes, kind, nodes=nodes):
        assert relative_error(parameters, one_process()) <= 1e-12


def test_a_single_number_gets_an_exact_zero_too(workers):
    for parameters in workers(2).run(train_on_masks, "fsdp", [3, 1], "mean", Scaled, nodes=(2,)):
        assert relative_error(parameters, one_process(Scaled)) <= 1e-12
