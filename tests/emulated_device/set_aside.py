# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings of blocks in host memory beside one that is gathered, on a node whose ranks are not equally far."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_device as device
from device_training import OPTIONS, SAMPLES, WORDS, Block, batch, whole
from streamed_training import backward
from torch import nn
from torch.nn import functional

from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.engine import Engine
from accelerate_lshdp.engine.mixed_policies import resolve_placement
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.stores.streamed.gradients import DeviceGradients
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


DEPTH = 8
STEPS = 2
#: The first block is the last one of a backward: a rank that gathers it may wait there for the others.
BESIDE_GATHERED = ModelPlacement(
    {"blocks.0": UnitPlacement(UnitStore.WORLD), "": UnitPlacement(UnitStore.WORLD)}, UnitPlacement(UnitStore.HOST)
)


class Deep(nn.Module):
    """Blocks, of which a forward may leave out the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(x)


def _loss(model: nn.Module, tokens: torch.Tensor, depth: int) -> torch.Tensor:
    return functional.cross_entropy(model(tokens, depth)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _reference(model: nn.Module, depths: list[int]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step in range(STEPS):
        for tokens, depth in zip(batch(step).chunk(len(depths)), depths, strict=True):
            (_loss(model, tokens, depth) / len(depths)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_patiently(depths: list[int], slow: list[int], patience_seconds: float) -> dict[str, Any]:
    """`train` of ranks that wait for others for so long."""
    with mock.patch("accelerate_lshdp.engine.stores.streamed.store.PATIENCE_SECONDS", patience_seconds):
        return train(depths, slow)


def train(depths: list[int], slow: list[int]) -> dict[str, Any]:
    """How far the parameters are from those of one process, what raced, and how many buckets were set aside.

    Args:
        depths: blocks that the forward of each rank computes.
        slow: ranks whose devices are slower than those of the others.
    """
    device.join_device_world()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert SAMPLES % ranks == 0
    topology = Topology(rank, (ranks,))
    torch.manual_seed(0)
    model = Deep().double()
    expected = _reference(copy.deepcopy(model), depths)
    placement = Placement(
        resolve_placement(BESIDE_GATHERED, topology, device_type="emulated"),
        topology,
        device=torch.device("emulated", 0),
        clock=WaitClock(),
        communication=Communication(),
        units=None,
        prefetch=1,
        bucket_bytes=4096,
        placement=BESIDE_GATHERED,
    )
    engine = Engine(placement)
    engine.require_placeable(model)
    prepared = engine.place(model, dict(model.named_parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    device.synchronize()
    device.reset()
    device.configure(compute_delay=0.01 if rank in slow else 0.0)
    set_aside = DeviceGradients.set_aside
    with mock.patch.object(DeviceGradients, "set_aside", autospec=True, side_effect=set_aside) as aside:
        for step in range(STEPS):
            loss = _loss(model, batch(step).chunk(ranks)[rank].to("emulated"), depths[rank])
            backward(prepared, loss / ranks * engine.loss_multiplier)
            engine.before_step(optimizer)
            engine.hide_gradients_of_others(optimizer)
            optimizer.step()
            engine.after_step()
            optimizer.zero_grad()
    device.synchronize()
    races = device.races()
    device.configure()
    error = max((whole(p) - expected[name]).abs().max().item() for name, p in model.named_parameters())
    return {"error": error, "races": races, "aside": aside.call_count}
