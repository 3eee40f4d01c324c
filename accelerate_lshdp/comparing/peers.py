# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Plain PyTorch, as its documentation has it: what the strategies are compared with. Uses nothing of this package.

Defaults everywhere: buckets, resharding, reduction. FSDP2 shards every block and the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def wrap(name: str, model: nn.Module, blocks: Sequence[nn.Module], ranks_per_node: int) -> nn.Module:
    """The model as ``torch_ddp``, ``torch_fsdp`` (full shard) or ``torch_hsdp`` (sharded inside each node)."""
    if name == "torch_ddp":
        return DistributedDataParallel(model)
    device = next(model.parameters()).device.type
    world_size = dist.get_world_size()
    if name == "torch_fsdp":
        mesh = init_device_mesh(device, (world_size,))
    else:
        shape = (world_size // ranks_per_node, ranks_per_node)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class PeerTraining:
    """A plain training loop with equal batches.

    Args:
        model: as `wrap` returned it.
        optimizer: of its parameters.
        samples: the data set, in the order in which it is trained.
        batch_size: samples of each rank.
        span: called with "data", "forward", "backward" and "optimizer" around each of them.
        device: of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        samples: Dataset,
        batch_size: int,
        span: Callable[[str], AbstractContextManager],
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.span = span
        self.device = device
        self._batches = self._endless(DataLoader(samples, batch_sampler=_Slices(len(samples), batch_size)))

    def step(self) -> tuple[float, int]:
        """One optimizer step; returns this rank's loss and its samples."""
        with self.span("data"):
            batch = {name: value.to(self.device) for name, value in next(self._batches).items()}
        with self.span("forward"):
            loss = self.model(**batch).loss
        with self.span("backward"):
            loss.backward()
        with self.span("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item(), len(batch["labels"])

    @staticmethod
    def _endless(loader: DataLoader) -> Iterator[dict[str, Any]]:
        while True:
            yield from loader


class _Slices:
    """This rank's samples of each global batch: the rank-th part of the next world_size * batch_size ones."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        total = dist.get_world_size() * self.batch_size
        for start in range(dist.get_rank() * self.batch_size, self.samples // total * total, total):
            yield list(range(start, start + self.batch_size))
