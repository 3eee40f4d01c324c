# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trains a tiny model with the accelerator and compares it with one process: the body of invariant 1's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from training_cases import CASES, collate, freeze, make_optimizer, reference_run, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement


LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.05
MAX_GRAD_NORM = 1.0
#: Relative error allowed: of the first gradient and of the parameters after the last step.
TOLERANCE = {"float64": (1e-12, 1e-12), "float32": (1e-6, 5e-6)}


@dataclass(frozen=True)
class Setting:
    """One cell of the matrix."""

    strategy: str
    sizes: tuple
    nodes: tuple[int, ...]
    model: str = "vit"
    dtype: str = "float64"
    own_accumulation: int = 1
    unequal_accumulation: bool = False
    steps: int = 6
    short_batch: int = 3
    frozen: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    num_workers: int = 0
    set_to_none: bool = True
    clip_value: float | None = None
    epochs: int = 1
    intra_node: str = "auto"
    placement: ModelPlacement | None = None
    layers: int = 2
    optimizer: tuple[tuple[str, bool], ...] = ()  # options of AdamW

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        sizes = "-".join(f"{s[0]}x{s[1]}" if isinstance(s, tuple) else str(s) for s in self.sizes)
        nodes = "+".join(map(str, self.nodes))
        parts = [self.strategy, f"n{nodes}", sizes, self.model, self.dtype[-2:]]
        parts += [f"g{self.own_accumulation}"] if self.own_accumulation > 1 else []
        parts += ["frozen"] if self.frozen else []
        parts += ["checkpointing"] if self.gradient_checkpointing else []
        parts += [self.intra_node] if self.intra_node != "auto" else []
        return "_".join(parts)


def prepared(plan: Plan, model: nn.Module, dataset, batch_size: int = 2, plugin: LSDPPlugin | None = None, **options):
    """An accelerator with the model, an optimizer and a loader prepared by it."""
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=plugin, **options)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plan_of(setting: Setting) -> Plan:
    return Plan.from_batch_sizes(
        setting.sizes,
        strategy=setting.strategy,
        allow_unequal_accumulation=setting.unequal_accumulation,
        intra_node=setting.intra_node,
        placement=setting.placement,
    )


def global_batches(setting: Setting, total: int) -> tuple[int, list[list[int]]]:
    """Number of samples of an epoch, and the global batches of all epochs: the last of each is short."""
    count = total * (setting.steps * setting.own_accumulation - 1) + min(setting.short_batch, total)
    batches = [list(range(start, min(start + total, count))) for start in range(0, count, total)]
    return count, batches * setting.epochs


def train(setting: Setting, **options) -> tuple[float, float]:
    """Runs on every rank; returns the errors of the first gradient and of the final parameters.

    Args:
        setting: what is trained.
        **options: of the accelerator.
    """
    case = CASES[setting.model]
    dtype = getattr(torch, setting.dtype)
    plan = plan_of(setting)
    accelerator = LSHDPAccelerator(
        plan=plan,
        lsdp_plugin=LSDPPlugin(loss_weighting=case.weighting, token_counter=None),
        gradient_accumulation_steps=setting.own_accumulation,
        **options,
    )
    count, batches = global_batches(setting, plan.total_batch_size)
    # Ranks start with different weights: those of rank 0 are what all train.
    model = freeze(case.model(setting.layers, seed=accelerator.process_index).to(dtype), setting.frozen)
    if setting.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(model, LEARNING_RATE, WEIGHT_DECAY, **dict(setting.optimizer))
    loader = DataLoader(case.dataset(count, dtype), batch_size=2, collate_fn=collate, num_workers=setting.num_workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first: dict[str, torch.Tensor] = {}
    model.train()
    for _ in range(setting.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, batch))
                if accelerator.sync_gradients:
                    if not first:
                        first = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
                    accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                    if setting.clip_value is not None:
                        accelerator.clip_grad_value_(model.parameters(), setting.clip_value)
                optimizer.step()
                optimizer.zero_grad(set_to_none=setting.set_to_none)
    first = {name: gradient.cpu() for name, gradient in first.items()}
    parameters = {name: full(parameter).cpu() for name, parameter in model.named_parameters()}
    reference = reference_run(
        setting.model,
        dtype,
        batches,
        weighting=case.weighting,
        steps=setting.steps * setting.epochs,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        clip_value=setting.clip_value,
        gradient_accumulation_steps=setting.own_accumulation,
        frozen=setting.frozen,
        model=case.model(setting.layers),
    )
    return (
        relative_error(first, reference.first_gradient),
        relative_error(parameters, reference.parameters),
    )


def check(errors: Sequence[tuple[float, float]], dtype: str) -> None:
    gradient_tolerance, parameter_tolerance = TOLERANCE[dtype]
    for rank, (gradient, parameters) in enumerate(errors):
        assert gradient <= gradient_tolerance, f"rank {rank}: first gradient is off by {gradient:.2e}"
        assert parameters <= parameter_tolerance, f"rank {rank}: parameters are off by {parameters:.2e}"
