# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Models that do not run once from end to end: branches, unused parameters, repeated blocks, two models (4.8)."""

from __future__ import annotations

import pytest
import torch
from exactness import full, prepared
from torch import nn
from torch.utils.data import DataLoader
from training_cases import collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


class Branching(nn.Module):
    """`extra` is used by the ranks whose inputs are positive, `never` by none; `block` runs only where told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
        self.extra = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, use_extra: bool, skip_block: bool) -> torch.Tensor:
        hidden = inputs
        for index, block in enumerate(self.blocks):
            if not (skip_block and index == 1):
                hidden = hidden + block(hidden)
        if use_extra:
            hidden = hidden + self.extra(hidden)
        return self.head(hidden)


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.sin(torch.arange(4, dtype=torch.float64) + index)}


def branch_losses(model: nn.Module, batch: dict, rank: int, skip_block: bool) -> torch.Tensor:
    return model(batch["inputs"], use_extra=rank == 0, skip_block=skip_block and rank == 1).square().mean()


def train_branching(strategy: str, skip_block: bool, intra_node: str) -> tuple[dict, bool]:
    plan = Plan.from_batch_sizes([4, 2], strategy=strategy, intra_node=intra_node)
    accelerator, model, optimizer, loader = prepared(plan, Branching().double(), Points())
    model.train()
    for batch in loader:
        accelerator.backward(branch_losses(model, batch, accelerator.process_index, skip_block))
        unused_has_gradient = any(p.grad is not None for n, p in model.named_parameters() if "never" in n)
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(p) for name, p in model.named_parameters()}, unused_has_gradient


def branching_reference(skip_block: bool) -> dict:
    model = Branching().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for start in (0, 6):
        batch = collate([Points()[index] for index in range(start, start + 6)])
        first, second = ({"inputs": part} for part in batch["inputs"].split([4, 2]))
        loss = branch_losses(model, first, 0, skip_block) * 4 / 6 + branch_losses(model, second, 1, skip_block) * 2 / 6
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "nodes", "skip_block", "intra_node"),
    [
        ("ddp", (1, 1), True, "auto"),
        ("lsdp", (1, 1), True, "collectives"),  # a whole unit that one node does not run
        ("group_sharding", (2,), False, "collectives"),
        ("fsdp", (1, 1), False, "auto"),
        ("zero2", (2,), False, "auto"),
        ("lsdp", (2,), True, "auto"),
        ("ddp", (2,), True, "auto"),
    ],
)
def test_parameters_unused_on_one_rank_or_on_all(workers, strategy, nodes, skip_block, intra_node):
    expected = branching_reference(skip_block)
    settings = strategy, skip_block, intra_node
    for parameters, unused_has_gradient in workers(2).run(train_branching, *settings, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12
        assert not unused_has_gradient


class NamesItsBlocks(Branching):
    """Has a method ``parameters`` of its own, as of models whose author gives a part of them to an optimizer."""

    def parameters(self):  # noqa: ANN201 - as scripts have it
        return self.blocks.parameters()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs, use_extra=True, skip_block=False)


def optimizer_of_all(model: nn.Module) -> torch.optim.Optimizer:
    rest = [parameter for part in (model.extra, model.never, model.head) for parameter in part.parameters()]
    return torch.optim.SGD([{"params": model.parameters()}, {"params": rest, "lr": 0.2}], lr=0.1)


def train_own_parameters(strategy: str, intra_node: str) -> dict:
    placement = None
    if strategy == "osdp":
        units = {"": UnitPlacement(UnitStore.REPLICATE), "blocks.0": UnitPlacement(UnitStore.WORLD_KEPT)}
        placement = ModelPlacement(units, UnitPlacement(UnitStore.WORLD))
    plan = Plan.from_batch_sizes([4, 2], strategy=strategy, intra_node=intra_node, placement=placement)
    model = NamesItsBlocks().double()
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    loader = DataLoader(Points(), 2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of_all(model), loader)
    for batch in loader:
        accelerator.backward(model(batch["inputs"]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "nodes", "intra_node"),
    [
        ("ddp", (1, 1), "auto"),
        ("ddp", (2,), "auto"),
        ("lsdp", (2,), "auto"),
        ("lsdp", (1, 1), "auto"),
        ("lsdp", (2,), "collectives"),
        ("fsdp", (1, 1), "auto"),
        ("zero2", (2,), "auto"),
        ("osdp", (1, 1), "auto"),
    ],
)
def test_models_with_a_method_of_their_own_for_parameters(workers, strategy, nodes, intra_node):
    model = NamesItsBlocks().double()
    optimizer = optimizer_of_all(model)
    for start in (0, 6):
        batch = collate([Points()[index] for index in range(start, start + 6)])
        model(batch["inputs"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for parameters in workers(2).run(train_own_parameters, strategy, intra_node, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12


class FrozenFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)])
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


def gradient_of_what_was_frozen() -> torch.Tensor:
    plugin = LSDPPlugin(mixed_precision="bf16", loss_weighting="sample")
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([4, 2], strategy="fsdp"), lsdp_plugin=plugin)
    model, loader = FrozenFirst(), DataLoader(Points(), 2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    model.requires_grad_(True)
    accelerator.backward(model(next(iter(loader))["inputs"].float()).float().square().mean())
    return full(model.blocks[0][0].weight.grad).float()


def test_a_unit_that_is_unfrozen_before_the_first_forward(workers):
    model = FrozenFirst().requires_grad_(True)
    model(collate([Points()[index] for index in range(6)])["inputs"].float()).square().mean().backward()
    for gradient in workers(2).run(gradient_of_what_was_frozen, nodes=(1, 1)):
        assert relative_error({"": gradient}, {"": model.blocks[0][0].weight.grad}) <= 0.05  # bf16


def train_after_a_part(strategy: str) -> dict:
    placement = None
    if strategy == "osdp":
        placement = ModelPlacement({"": UnitPlacement(UnitStore.REPLICATE)}, UnitPlacement(UnitStore.WORLD))
    plan = Plan.from_batch_sizes([4, 2], strategy=strategy, placement=placement)
    accelerator, model, optimizer, loader = prepared(plan, Branching().double(), Points())
    with torch.no_grad():
        found = model.blocks[1](torch.ones(4, dtype=torch.float64))
    model.train()
    for batch in loader:
        accelerator.backward(branch_losses(model, batch, accelerator.process_index, False))
        optimizer.step()
        optimizer.zero_grad()
    return {"part": found, **{name: full(p) for name, p in model.named_parameters()}}


@pytest.mark.parametrize("strategy", ["ddp", "lsdp", "fsdp", "zero2", "osdp"])
def test_a_part_that_is_called_before_the_model(workers, strategy):
    """As a `generate` does that calls the blocks itself."""
    part = Branching().double().blocks[1](torch.ones(4, dtype=torch.float64)).detach()
    expected = {"part": part, **branching_reference(False)}
    for found in workers(2).run(train_after_a_part, strategy, nodes=(1, 1)):
        assert relative_error(found, expected) <= 1e-12


def gradient_with_cast() -> dict:
    """As on GPUs, where a unit's sum is needed at once: bf16 parameters, whose gradients are cast after the sum."""
    plan = Plan.from_batch_sizes([4, 2], strategy="lsdp", intra_node="collectives")
    plugin = LSDPPlugin(mixed_precision="bf16")
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=plugin)
    model, loader = Branching().to(torch.bfloat16), DataLoader(Points(), 2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)
    model.train()
    batch = next(iter(loader))
    skips = accelerator.process_index == 1
    accelerator.backward(model(batch["inputs"], use_extra=False, skip_block=skips).float().square().mean())
    return {name: full(p.grad).float() for name, p in model.named_parameters() if p.grad is not None}


def test_a_unit_that_one_node_skips_keeps_its_turn_where_sums_are_needed_at_once(workers):
    model = Branching()
    first, second = collate([Points()[index] for index in range(6)])["inputs"].float().split([4, 2])
    (
        model(first, False, False).square().mean() * 4 / 6 + model(second, False, True).square().mean() * 2 / 6
    ).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in workers(2).run(gradient_with_cast, nodes=(1, 1)):
        assert relative_error(gradient, expected) <= 0.02  # bf16 has 8 bits; a sum with another unit's would be > 0.5


class Recurrent(nn.Module):
    """One block that runs three times in each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            inputs = self.blocks[0](inputs)
        return self.head(inputs)


def train_recurrent(strategy: str, steps: int) -> dict:
    plan = Plan.from_batch_sizes([(2, steps), (1, steps)], strategy=strategy)
    accelerator, model, optimizer, loader = prepared(plan, Recurrent().double(), Points())
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["inputs"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_a_block_that_runs_several_times_in_a_forward(workers, strategy, nodes, steps):
    model = Recurrent().double()
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for start in range(0, 12, 3 * steps):
        batch = collate([Points()[index] for index in range(start, start + 3 * steps)])
        model(batch["inputs"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters in workers(2).run(train_recurrent, strategy, steps, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12


# Two models


def adversaries(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    return maker, judge


def judge_loss(maker: nn.Module, judge: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (judge(inputs) - 1).square().mean() + judge(maker(inputs).detach()).square().mean()


def maker_loss(maker: nn.Module, judge: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (judge(maker(inputs)) - 1).square().mean()


def adversarial_steps(maker, judge, maker_optimizer, judge_optimizer, batches, backward) -> None:
    for batch in batches:
        backward(judge_loss(maker, judge, batch["inputs"]))  # does not depend on the maker's parameters
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        backward(maker_loss(maker, judge, batch["inputs"]))  # leaves gradients in the judge, too
        maker_optimizer.step()
        maker_optimizer.zero_grad()


def train_adversaries(strategy: str) -> dict:
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([2, 1], strategy=strategy))
    models = adversaries(torch.float64)
    optimizers = [make_optimizer(model, 1e-2, 0.0) for model in models]
    maker, judge, *rest = accelerator.prepare(*models, *optimizers, DataLoader(Points(), 1, collate_fn=collate))
    adversarial_steps(maker, judge, *rest, accelerator.backward)
    return {f"{i}.{n}": full(p) for i, model in enumerate((maker, judge)) for n, p in model.named_parameters()}


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))])
def test_two_models_that_train_against_each_other(workers, strategy, nodes):
    maker, judge = models = adversaries(torch.float64)
    batches = [collate([Points()[index] for index in range(start, start + 3)]) for start in range(0, 12, 3)]
    optimizers = [make_optimizer(model, 1e-2, 0.0) for model in models]
    adversarial_steps(maker, judge, *optimizers, batches, lambda loss: loss.backward())
    expected = {f"{i}.{n}": p.detach() for i, model in enumerate(models) for n, p in model.named_parameters()}
    for parameters in workers(2).run(train_adversaries, strategy, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12
