# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings on an emulated device that has little memory, and what the host has for them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch_device as device
from streamed_training import Case, backward, place
from torch import nn
from torch.utils.checkpoint import checkpoint


WIDTH = 128
WORDS = 4096
STEPS = 2


class Deep(nn.Module):
    """Equal blocks whose activations are computed again."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Vocabulary(nn.Module):
    """A language model that is an embedding and a head, mostly."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def peak_of_a_vocabulary(tied: bool, slices: int) -> dict[str, int]:
    """Bytes of a training of `Vocabulary`: at the peak on the device, pinned, and of one of its weights."""
    device.join_device_world()
    torch.manual_seed(0)
    model = Vocabulary(tied)
    before = device.counts()
    device.reset()
    engine, prepared = place(Case(nodes=(1,), dtype="float32", slices=slices), model)
    for _ in range(STEPS):
        tokens = torch.arange(8).view(2, 4).to("emulated")
        backward(prepared, model(tokens) * engine.loss_multiplier)
        model.zero_grad()
    device.synchronize()
    after = device.counts()
    return {
        "peak": after["peak_device_bytes"] - before["device_bytes"],
        "pinned": after["pinned_bytes"] - before["pinned_bytes"],
        "weight": WORDS * WIDTH * 4,
    }


def trained(strategy: str, depth: int, precision: str, limit: int | None) -> dict[str, int] | str:
    """Bytes of a training: at the peak on the device, pinned, and of this rank's moments; or what is short."""
    device.join_device_world()
    nodes = (dist.get_world_size(),)
    torch.manual_seed(0)
    model = Deep(depth)
    count = sum(parameter.numel() for parameter in model.parameters())
    before = device.counts()
    device.reset()
    case = Case(strategy=strategy, nodes=nodes, dtype="float32", precision=precision)
    try:
        free = device.NO_LIMIT if limit is None else before["device_bytes"] + limit
        device.configure(limit=free)
        if strategy in ("ddp", "group_sharding"):
            model.to("emulated")
        engine, prepared = place(case, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            backward(prepared, model(torch.ones(2, WIDTH).to("emulated")).square().mean())
            engine.before_step(optimizer)
            engine.hide_gradients_of_others(optimizer)
            optimizer.step()
            engine.after_step()
            optimizer.zero_grad()
        device.synchronize()
        states = [value for state in optimizer.state.values() for value in state.values()]
        after = device.counts()
        return {
            "peak": after["peak_device_bytes"] - before["device_bytes"],
            "pinned": after["pinned_bytes"] - before["pinned_bytes"],
            "states": sum(value.nbytes for value in states if value.device.type == "cpu"),
            "parameters": count,
        }
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    finally:
        device.configure()
