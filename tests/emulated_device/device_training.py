# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A training by the engine on the emulated device, and the same one by plain torch in one process on the CPU."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
import torch_device as device
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from accelerate_lshdp import Strategy
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.clipping import clip_grad_norm
from accelerate_lshdp.engine.engine import Engine
from accelerate_lshdp.engine.mixed_policies import resolve_placement
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.policies import resolve_policies
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


WORDS = 13
SAMPLES = 12
STEPS = 3
OPTIONS = {"lr": 1e-2, "weight_decay": 0.01}
FORMAT_OPTIONS = {"powersgd": {"powersgd_warmup_steps": 1}}
#: Of strategy osdp: one block in host memory, one that is recomputed, one in slices beside a head in slices.
MIXED = ModelPlacement(
    {
        "blocks.0": UnitPlacement(UnitStore.HOST),
        "blocks.1": UnitPlacement(UnitStore.WORLD_KEPT, checkpoint=True),
        "blocks.2": UnitPlacement(UnitStore.WORLD, slices=2),
        "": UnitPlacement(UnitStore.WORLD, slices=2),
    },
    UnitPlacement(UnitStore.REPLICATE),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def reference(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        parameter = parameter.detach().to("emulated").full_tensor()
    return parameter.detach().cpu()


def fail(prepared: PreparedModel, loss: torch.Tensor, last: torch.Tensor) -> None:
    """A backward that fails where the gradient of ``last`` comes, when all others travel already."""

    def interrupt(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    hook = last.register_hook(interrupt)
    prepared.begin_backward(True)
    with contextlib.suppress(ArithmeticError):
        loss.backward()
    prepared.abandon_backward()
    hook.remove()
    prepared.drop_gradients()


def train(
    strategy: str,
    nodes: tuple[int, ...],
    delays: dict[str, float],
    wire_format: str = "fp32",
    intra_node: str = "auto",
    fails: bool = False,
) -> dict[str, Any]:
    """How far the parameters are from those of one process, what raced, and for which operators the host waited.

    Args:
        strategy: of the engine.
        nodes: ranks of each.
        delays: of the device.
        wire_format: of gradients.
        intra_node: how ranks of a node meet.
        fails: whether a first backward fails in its middle, on all ranks.
    """
    device.join_device_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    topology = Topology(rank, nodes)
    torch.manual_seed(0)
    model = Net()
    expected = reference(copy.deepcopy(model))
    mixed = MIXED if strategy == "osdp" else None
    if mixed is None:
        policies = resolve_policies(Strategy(strategy), topology, device_type="emulated", intra_node=intra_node)
    else:
        policies = resolve_placement(mixed, topology, device_type="emulated")
    placement = Placement(
        policies,
        topology,
        device=torch.device("emulated", 0),
        clock=WaitClock(),
        communication=Communication(dtype=wire_format, intra_node=intra_node, **FORMAT_OPTIONS.get(wire_format, {})),
        units=None,
        prefetch=1,
        bucket_bytes=4096,
        placement=mixed,
    )
    if not policies.is_sharded:
        model.to("emulated")
    engine = Engine(placement)
    engine.require_placeable(model)
    prepared = engine.place(model, dict(model.named_parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    device.synchronize()
    device.reset()
    device.configure(**delays)
    if fails:
        fail(prepared, loss_of(model, batch(0).chunk(world_size)[rank].to("emulated")), model.embed.weight)
    for step in range(STEPS):
        tokens = batch(step).chunk(world_size)[rank].to("emulated")
        loss = loss_of(model, tokens) / world_size * engine.loss_multiplier
        prepared.begin_backward(True)
        loss.backward()
        prepared.deliver_backward()
        prepared.finish_backward()
        clip_grad_norm(model.parameters(), 1.0)
        engine.before_step()
        engine.hide_gradients_of_others(optimizer)
        optimizer.step()
        engine.after_step()
        optimizer.zero_grad()
    device.synchronize()
    races, waited, counts = device.races(), device.waited_operators(), device.counts()
    device.configure()
    error = max((whole(p) - expected[name]).abs().max().item() for name, p in model.named_parameters())
    return {"error": error, "races": races, "waited": waited, "counts": counts}
