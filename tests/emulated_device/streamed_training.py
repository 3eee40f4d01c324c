# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings by the streamed store on the emulated device, and the same ones by plain torch in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import streamed_models as models
import torch
import torch.distributed as dist
import torch_device as device
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp import Strategy
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.clipping import clip_grad_norm
from accelerate_lshdp.engine.engine import Engine
from accelerate_lshdp.engine.flow import Flow
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.policies import resolve_policies
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


STEPS = 3
OPTIONS = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-6}


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: a name of `streamed_models.MODELS`.
        nodes: ranks of each node.
        dtype: of the parameters.
        precision: mixed precision.
        strategy: of the plan.
        accumulation: backwards before a step, of which the last one synchronises.
        pairs: whether each backward is that of two forwards.
        delays: of the device.
        ahead: units fetched ahead.
    """

    model: str = "Plain"
    nodes: tuple[int, ...] = (2,)
    dtype: str = "float64"
    precision: str = "no"
    strategy: str = "lsdp"
    accumulation: int = 1
    pairs: bool = False
    delays: tuple[tuple[str, float], ...] = ()
    ahead: int = 1


def loss_of(case: Case, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return (models.paired_loss if case.pairs else models.loss_of)(model, tokens)


def micro_batch(case: Case, step: int, number: int) -> torch.Tensor:
    return models.batch(step * case.accumulation + number)


def reference(case: Case, model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
    for step in range(STEPS):
        for number in range(case.accumulation):
            (loss_of(case, model, micro_batch(case, step, number)) / case.accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        parameter = parameter.detach().to("emulated").full_tensor()
    return parameter.detach().cpu().clone()


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return models.MODELS[case.model]().to(getattr(torch, case.dtype))


def place(case: Case, model: nn.Module) -> tuple[Engine, PreparedModel]:
    topology = Topology(dist.get_rank(), case.nodes)
    policies = resolve_policies(
        Strategy(case.strategy), topology, device_type="emulated", mixed_precision=case.precision
    )
    placement = Placement(
        policies,
        topology,
        device=torch.device("emulated", 0),
        clock=WaitClock(),
        communication=Communication(),
        units=None,
        prefetch=case.ahead,
        bucket_bytes=4096,
    )
    engine = Engine(placement)
    engine.require_placeable(model)
    return engine, engine.place(model, dict(model.named_parameters(remove_duplicate=False)))


def backward(prepared: PreparedModel, loss: torch.Tensor, *, synchronise: bool = True) -> None:
    with Flow([prepared]) as flow:
        prepared.synchronise_next = synchronise
        flow.begin()
        loss.backward()
        flow.deliver([prepared])
        flow.finish([prepared])


def run(case: Case, model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters after some steps on this case's ranks."""
    engine, prepared = place(case, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
    device.synchronize()
    device.reset()
    device.configure(**dict(case.delays))
    for step in range(STEPS):
        for number in range(case.accumulation):
            tokens = micro_batch(case, step, number).chunk(dist.get_world_size())[dist.get_rank()].to("emulated")
            loss = loss_of(case, model, tokens) / dist.get_world_size() / case.accumulation * engine.loss_multiplier
            backward(prepared, loss, synchronise=number == case.accumulation - 1)
            prepared.drop_unused(_used_anywhere(prepared))
        clip_grad_norm(model.parameters(), 1.0)
        engine.before_step()
        engine.hide_gradients_of_others(optimizer)
        optimizer.step()
        engine.after_step()
        optimizer.zero_grad()
    device.synchronize()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def _used_anywhere(prepared: PreparedModel) -> torch.Tensor:
    usage = prepared.take_usage()
    dist.all_reduce(usage)
    return usage


def train(case: Case) -> dict[str, Any]:
    """How far the parameters are from those of one process, what raced, and what was counted."""
    device.join_device_world()
    model = make_model(case)
    expected = reference(case, copy.deepcopy(model))
    found = run(case, model)
    races, counts = device.races(), device.counts()
    device.configure()
    error = max((found[name] - expected[name]).abs().max().item() for name in expected)
    return {"error": error, "races": races, "counts": counts, "bytes": bytes_of(model, case)}


def bytes_of(model: nn.Module, case: Case) -> int:
    """Bytes of the parameters as they are computed with."""
    size = 2 if case.precision == "bf16" else torch.empty(0, dtype=getattr(torch, case.dtype)).itemsize
    return sum(parameter.numel() for parameter in model.parameters()) * size


def equals_resident(case: Case, resident: Case) -> bool:
    """Whether two cases, of which one keeps its parameters on the device, end with the same bits."""
    device.join_device_world()
    one = run(case, make_model(case))
    other = run(resident, make_model(resident))
    device.configure()
    return all(torch.equal(one[name], other[name]) for name in one)


def shares_groups_with_the_world() -> bool:
    """Whether any sum between nodes goes over the group of all ranks, which the training loop uses meanwhile."""
    device.join_device_world()
    _, prepared = place(Case(nodes=(1, 1)), make_model(Case()))
    return any(reduction.group is dist.group.WORLD for reduction in prepared.reductions)
