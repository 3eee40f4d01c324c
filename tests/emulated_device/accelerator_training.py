# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Trainings by the accelerator on the emulated device, as accelerate finds any device that has a name."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import exactness
import test_resume
import torch
import torch.distributed as dist
import torch_device as device
import trainer_cases
from accelerate import DistributedType, PartialState
from exactness import Setting, prepared
from torch.utils.data import DataLoader
from training_cases import CASES, collate, tiny_vit

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.profiling import ProfilingOptions, Subject, profile_ranks


_PLAN_OF = exactness.plan_of


def on_emulated_device(devices: Sequence[str] = ()) -> None:
    """Lets accelerate take the emulated device for that of this rank.

    Args:
        devices: types of the devices of each node, if they differ; then ranks meet in the world of gloo.
    """
    if not devices:
        device.join_device_world()
    elif devices[int(os.environ["GROUP_RANK"])] == "cpu":
        return
    # Without an index, as accelerate names the device of a process that runs alone.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "emulated"
    # accelerate knows no backend for a device of this name.
    PartialState._prepare_backend = lambda self, cpu=False, sagemaker_dp=False, backend=None: (
        backend or "gloo",
        DistributedType.MULTI_CPU,
    )
    del os.environ["ACCELERATE_USE_CPU"]


def train(
    setting: Setting, devices: Sequence[str] = (), total: int | None = None, mixed_precision: str = "no"
) -> dict[str, Any]:
    """The errors of `exactness.train`, and what raced.

    Args:
        setting: what is trained.
        devices: types of the devices of each node, if they differ.
        total: samples in a global batch that the run divides itself, in the place of the sizes of the setting.
        mixed_precision: of the accelerator.
    """
    on_emulated_device(devices)
    device.reset()
    device.configure(copy_delay=0.001)
    if total is not None:
        exactness.plan_of = lambda setting: Plan.auto(total, strategy=setting.strategy, rebalance_every=1)
    try:
        errors = exactness.train(setting, mixed_precision=mixed_precision)
    finally:
        exactness.plan_of = _PLAN_OF
    races = device.races()
    device.configure()
    return {"errors": errors, "races": races}


def trained_in_parts(
    options: dict[str, Any], devices: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The parameters and losses of a run of `test_resume`."""
    on_emulated_device(devices)
    parameters, losses, _ = test_resume.train(test_resume.Run(**options))
    return {name: parameter.cpu() for name, parameter in parameters.items()}, losses


def profiled(to_device: float, to_host: float) -> dict[str, Any]:
    """The ranks as a profile on the device measures them; copies travel at so many bytes a second."""
    on_emulated_device()
    case = CASES["vit"]
    model = case.model(2)
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes((2, 2), strategy="lsdp"))
    loader = DataLoader(case.dataset(32, torch.float32), batch_size=2, collate_fn=collate)
    subject = Subject(
        model, loader, torch.optim.AdamW(model.parameters()), lambda model, batch: case.loss(model, batch)
    )
    options = ProfilingOptions(seconds=4, total_batch_size=8, max_batch=4, strategy=accelerator.strategy)
    device.configure(to_device=to_device, to_host=to_host)
    profile = profile_ranks(subject, options, accelerator)
    device.configure()
    return {
        "seconds": [rank.time.seconds[0] for rank in profile.ranks],
        "hosts": [rank.host.to_dict() for rank in profile.ranks],
    }


def copy_module(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy in host memory, where that of a model before ``prepare`` would be."""
    copied = copy.deepcopy(model)
    found = [name for part in copied.modules() for name, value in vars(part).items() if "_hooks" in name and value]
    assert found == []
    return copied.to("cpu")


def evaluated() -> dict[str, Any]:
    """What evaluations between steps, a copy of the weights, and a freed model give."""
    on_emulated_device()
    case = CASES["vit"]
    dataset = case.dataset(24, torch.float64)
    model = case.model(2).double()
    accelerator, model, optimizer, loader = prepared(Plan.from_batch_sizes((2, 2), strategy="lsdp"), model, dataset)
    batch = collate([dataset[index] for index in range(4)])
    on_device = {name: tensor.to("emulated") for name, tensor in batch.items()}
    differences = []
    for own in loader:
        accelerator.backward(case.loss(model, own))
        optimizer.step()
        optimizer.zero_grad()
        copied = copy_module(model)
        model.eval()
        with torch.no_grad():
            found = model(on_device["pixel_values"]).logits.cpu()
        differences.append((found - copied.eval()(batch["pixel_values"]).logits).abs().max().item())
        model.train()
    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    accelerator.session.engine.close()
    alone = model.eval().to("cpu")(batch["pixel_values"]).logits
    expected = case.model(2).double().eval()
    expected.load_state_dict(weights)
    closed = (alone - expected(batch["pixel_values"]).logits).abs().max().item()
    return {"differences": differences, "closed": closed, "races": device.races()}


def statistics(strategy: str, delays: dict[str, float]) -> tuple[float, float]:
    """The seconds that this rank has computed and waited, where the device takes long for what is given."""
    on_emulated_device()
    case = CASES["vit"]
    run = prepared(Plan.from_batch_sizes((2, 2), strategy=strategy), case.model(2), case.dataset(12, torch.float32))
    accelerator, model, optimizer, loader = run
    device.configure(**delays)
    for own in loader:
        accelerator.backward(case.loss(model, own))
        optimizer.step()
        optimizer.zero_grad()
    device.configure()
    found, rank = accelerator.step_statistics, accelerator.process_index
    return found.compute_seconds[rank], found.wait_seconds[rank]


def _fail_once(optimizer: torch.optim.Optimizer) -> None:
    """Lets the next step of an optimizer raise an error before it changes anything."""

    def fail(*_: Any) -> None:
        del optimizer._init_group  # the class has it, too
        raise ValueError("out of memory, say")

    optimizer._init_group = fail


def steps_with(how: str) -> dict[str, Any]:
    """What becomes of steps that hooks of the script look at, or that fail and are made again.

    Returns:
        Whether the last step was late, what a hook has seen, and the parameters.
    """
    on_emulated_device()
    case, seen = CASES["vit"], []
    model = case.model(2)
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes((4,), strategy="lsdp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight = model.classifier.weight
    if how == "hook after the step":
        before = weight.detach().clone()
        optimizer.register_step_post_hook(lambda *_: seen.append(not torch.equal(weight.detach(), before)))
    loader = DataLoader(case.dataset(16, torch.float32), batch_size=4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if how == "hook before the step":
        optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad is not None))
    for number, own in enumerate(loader):
        accelerator.backward(case.loss(model, own))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if how == "failure" and number == 1:
            _fail_once(optimizer.optimizer)
            try:
                optimizer.step()
            except ValueError:
                seen.append(weight.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    late = accelerator.session.engine.models[0].stores[0]._late.is_pending
    return {"late": late, "seen": seen, "parameters": [p.detach().clone() for p in model.parameters()]}


def met(devices: Sequence[str]) -> dict[str, Any]:
    """What collectives of accelerate give on a rank of a mixed cluster, and on which type of device it is."""
    on_emulated_device(devices)
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes((2,) * dist.get_world_size(), strategy="lsdp"))
    rank, own = accelerator.process_index, accelerator.device
    found = {
        "gather": accelerator.gather(torch.full((rank + 1,), float(rank), device=own)),
        "reduce": accelerator.reduce({"value": torch.tensor([rank + 1.0], device=own)})["value"],
        "pad_across_processes": accelerator.pad_across_processes(torch.ones(rank + 1, device=own)),
    }
    accelerator.wait_for_everyone()
    return {name: (tensor.device.type, tensor.tolist()) for name, tensor in found.items()} | {"device": own.type}


class _Parameter(torch.nn.Parameter):
    """One with something more."""


def refused(devices: Sequence[str], what: str, strategy: str = "lsdp") -> str:
    """The error of something that these devices do not allow, or that only ranks with a device would find."""
    on_emulated_device(devices)
    plan = Plan.from_batch_sizes((2,) * dist.get_world_size(), strategy=strategy)
    case = CASES["vit"]
    model = case.model(2)
    loader = DataLoader(case.dataset(8, torch.float32), batch_size=2, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters())
    if what == "parameter":
        model.classifier.weight = _Parameter(model.classifier.weight.detach())
    if what == "plan of one rank" and dist.get_rank() == 1:
        plan = "nowhere.json"
    units = ("no such unit",) if what == "units" else None
    try:
        accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(units=units))
        if what == "profile":
            subject = Subject(model, loader, optimizer, case.loss)
            profile_ranks(subject, ProfilingOptions(seconds=4, total_batch_size=8), accelerator)
        accelerator.prepare(model, optimizer, loader)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "none"


def trained_by_script(run: trainer_cases.Run, devices: Sequence[str] = ()) -> list[str]:
    """Runs a script with a Trainer to its end; returns what raced."""
    on_emulated_device(devices)
    gather = dist.all_gather

    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor) -> None:
        received = [output.cpu() for output in outputs]
        gather(received, own.cpu())
        for output, each in zip(outputs, received, strict=True):
            output.copy_(each)

    if devices:
        # With which transformers gathers losses. gloo copies tensors of CUDA itself, and does not know this device.
        dist.all_gather = all_gather
    try:
        trainer_cases.start(run)
    finally:
        dist.all_gather = gather
    return device.races()


def refused_in_one_node() -> str:
    """The error of an accelerator whose first rank has a device and whose second one, of the same node, has none."""
    if dist.get_rank() == 0:
        on_emulated_device(("emulated",))
    try:
        LSHDPAccelerator(plan=Plan.from_batch_sizes((2, 2), strategy="lsdp"))
    except RuntimeError as error:
        return str(error)
    return "none"


def placed_by_the_run(share: float) -> dict[str, Any]:
    """A training whose blocks the run places itself, on a device that has room for a share of the model's states."""
    on_emulated_device()
    model = tiny_vit(layers=6, hidden=768)
    states = 16 * sum(parameter.numel() for parameter in model.parameters())
    device.reset()
    device.configure(limit=int(share * states))
    accelerator = LSHDPAccelerator(batch_sizes=(2, 2), placement="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    loader = DataLoader(CASES["vit"].dataset(16, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = CASES["vit"].loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peak, races = device.counts()["peak_device_bytes"], device.races()
    device.configure()
    stores = sorted({str(unit.store) for unit in accelerator.plan.placement.placements})
    return {"stores": stores, "peak": peak, "limit": int(share * states), "losses": losses, "races": races}
