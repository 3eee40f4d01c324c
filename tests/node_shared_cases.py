# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the tests of node-shared models have in common: a small model with tied, frozen and optional parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training_cases import collate, make_optimizer

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.engine.policies import Mechanism


class TwoHeads(nn.Module):
    """Tied and frozen parameters; each head can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.inner[2].weight = self.inner[0].weight
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, inputs: torch.Tensor, head: int | None = None) -> torch.Tensor:
        for layer in self.inner:
            inputs = torch.tanh(layer(inputs)) * self.frozen
        return sum(self.heads[i](inputs).square().mean() for i in ((0, 1) if head is None else (head,)))


class Points(Dataset):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.sin(torch.arange(4, dtype=torch.float64) + index)}


def batch_of(*indices: int) -> dict[str, torch.Tensor]:
    return collate([Points()[index] for index in range(*indices)])


def start(
    sizes: tuple = (2, 1), dataset: Dataset | None = None, optimizer_class=None, megabytes: float = 0.0002, **loading
):
    """An accelerator, and a model, an optimizer and a loader prepared by it."""
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes(sizes, strategy="lsdp"),
        lsdp_plugin=LSDPPlugin(bucket_megabytes=megabytes, loss_weighting="sample"),
    )
    assert accelerator.policies.mechanism is Mechanism.NODE_SHARED and accelerator.policies.notice is None
    model = TwoHeads().double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(model, 1e-2, 0.1) if optimizer_class is None else optimizer_class(trained, lr=1e-2)
    loader = DataLoader(dataset or Points(), batch_size=1, collate_fn=collate, **loading)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model.train(), optimizer, loader


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
