# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the checkpoint tests share: a small model under each layout, its full state read without checkpoint code."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from launching import base_environment, rank_environment
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accelerate_lshdp.checkpoint.run_state import NodeLayout, TrainingObjects


CPU = torch.device("cpu")


def layout() -> NodeLayout:
    """The layout that the launcher's variables describe."""
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK")
    return NodeLayout(*(int(os.environ[name]) for name in names), CPU)


def one_process() -> NodeLayout:
    return NodeLayout(rank=0, world_size=1, node=0, num_nodes=1, local_rank=0, device=CPU)


def node_folder(root: str | Path) -> Path:
    """The directory of this rank's node, which no other node sees."""
    return Path(root) / f"node{os.environ['GROUP_RANK']}"


class SmallModel(nn.Module):
    """Tied, frozen, bf16 and odd-sized parameters, persistent and other buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.block = nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.Linear(5, width))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.coarse = nn.Linear(width, 3).bfloat16()
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("counter", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embedding(tokens)) * self.scale
        return self.head(hidden).square().mean() + self.coarse(hidden.bfloat16()).float().square().mean()


def shard(model: nn.Module, kind: str) -> None:
    """Places parameters: "replicated", "flat" (1/world), "node" (1/ranks of the node), "hybrid" (same, 2-D mesh)."""
    if kind == "replicated":
        return
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if kind == "flat":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    elif kind == "hybrid":
        mesh = init_device_mesh("cpu", (world // local, local), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = DeviceMesh.from_group(node_group(), "cpu", mesh_dim_names=("shard",))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model.coarse, mesh=mesh)
    fully_shard(model, mesh=mesh)


def node_group() -> dist.ProcessGroup:
    """The ranks of this node; nodes may differ in size."""
    nodes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(nodes, int(os.environ["GROUP_RANK"]))
    members = [[rank for rank, node in enumerate(nodes) if node == wanted] for wanted in sorted(set(nodes))]
    return dist.new_subgroups_by_enumeration(members)[0]


def objects(kind: str = "replicated", seed: int = 0, steps: int = 0) -> TrainingObjects:
    """A model, its optimizer with two groups, and a scheduler; trained on the same data on all ranks."""
    torch.manual_seed(seed)
    model = SmallModel()
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        wrapped = model
        shard(model, kind)
    decayed = [model.embedding.weight, model.block[0].weight, model.block[2].weight, model.frozen]
    chosen = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "betas": (0.8, 0.99)}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 + seed)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    training = TrainingObjects(models=[wrapped], optimizers=[optimizer], schedulers=[scheduler])
    train(training, steps)
    return training


def train(training: TrainingObjects, steps: int) -> None:
    """Some optimizer steps on random tokens, the same on all ranks if their generators agree."""
    for _ in range(steps):
        training.models[0](torch.randint(0, 7, (4,))).backward()
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
        training.schedulers[0].step()


def full_state(training: TrainingObjects) -> dict[str, torch.Tensor]:
    """All parameters, persistent buffers and optimizer state, unsharded, by names of the test's own making."""
    model, optimizer = training.models[0], training.optimizers[0]
    model = model.module if isinstance(model, DistributedDataParallel) else model
    result = {f"model {name}": whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            result[f"state {name} {key}"] = whole(value)
    for index, group in enumerate(optimizer.param_groups):
        for key in ("lr", "weight_decay", "initial_lr"):
            result[f"group {index} {key}"] = torch.tensor(group[key], dtype=torch.float64)
        result[f"group {index} betas"] = torch.tensor(group["betas"], dtype=torch.float64)
    result["last epoch"] = torch.tensor(training.schedulers[0].last_epoch)
    return result


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, dtypes included."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def visible(folder: Path) -> list[str]:
    """Everything in a folder, hidden names included."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def run_until_killed(
    function: Callable[..., object], *args: object, nodes: Sequence[int], folder: Path, timeout: float = 300.0
) -> list[int]:
    """Runs a case whose ranks are meant to die, each in a process of its own, and returns the exit codes.

    Cheaper than the worker pool for this: processes are forked from a server that has imported torch once.

    Args:
        function, args: the case.
        nodes: ranks of each node.
        folder: an empty one for each call.
        timeout: of the process group, seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accelerate_lshdp.accelerator.accelerator", "torch.distributed.fsdp"])
    processes = []
    for rank in range(sum(nodes)):
        environment = {**base_environment(), **rank_environment(rank, nodes, 0)}
        arguments = (function, args, environment, str(folder / "store"), timeout)
        processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
    for process in processes:
        process.start()
    deadline = time.monotonic() + 40.0
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    assert not late, f"ranks {late} had not ended after 40 s"
    return [process.exitcode for process in processes]


def _run_rank(
    function: Callable[..., object], args: tuple, environment: dict[str, str], store: str, timeout: float
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    code = 1
    try:
        here = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        where = {"init_method": f"file://{store}", "rank": here[0], "world_size": here[1]}
        dist.init_process_group("gloo", **where, timeout=timedelta(seconds=timeout))
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # gloo can abort a process that ends the ordinary way
