# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Ranks in processes of their own, each with an emulated device (`tests/emulated_device`), and steps of models there.

Only these processes import the device: where it is, torch says that there is an accelerator.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from accelerate_lshdp.documents.placement import ModelPlacement
from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.engine import Engine
from accelerate_lshdp.engine.mixed_policies import resolve_placement
from accelerate_lshdp.engine.placement import Placement
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.topology import Topology
from accelerate_lshdp.runtime.wait_clock import WaitClock


def on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """What a function of a module returns on each rank of a world whose groups have the device."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_call, (folder, world_size, function, arguments), nprocs=world_size)
        return [torch.load(Path(folder) / str(rank)) for rank in range(world_size)]


def _call(rank: int, folder: str, world_size: int, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "emulated_device"))
    import torch_device as device

    # Of each rank, as they share the cores of this machine; said in a way that the package takes for the user's.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()  # a rank that joins leaves this world at once, while another one may still be connecting to it
    device.join_device_world()
    found = function(*arguments)
    device.configure()
    torch.save(found, Path(folder) / str(rank))
    dist.barrier()  # what a rank leaves early may be what another one still reads


class Training:
    """A model whose units are placed, and AdamW.

    Args:
        model: in host memory; it is changed in place.
        placement: of its units.
        nodes: ranks of each node.
        precision: mixed precision.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: ModelPlacement,
        nodes: Sequence[int],
        precision: str = "no",
    ) -> None:
        topology = Topology(dist.get_rank(), tuple(nodes))
        policies = resolve_placement(placement, topology, device_type="emulated", mixed_precision=precision)
        self.engine = Engine(
            Placement(
                policies,
                topology,
                device=torch.device("emulated", 0),
                clock=WaitClock(),
                communication=Communication(),
                units=None,
                prefetch=1,
                bucket_bytes=None,
                placement=placement,
            )
        )
        self.engine.require_placeable(model)
        self.prepared: PreparedModel = self.engine.place(model, dict(model.named_parameters()))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def backward(self, loss: torch.Tensor, *, synchronise: bool = True) -> None:
        """The backward of this rank's part of a mean over all ranks."""
        self.prepared.begin_backward(synchronise)
        (loss * (self.engine.loss_multiplier / dist.get_world_size())).backward()
        self.prepared.deliver_backward()
        self.prepared.finish_backward()

    def step(self) -> None:
        """An optimizer's step, which may be late."""
        self.engine.step_begins(self.optimizer)
        self.engine.before_step(self.optimizer)
        self.engine.hide_gradients_of_others(self.optimizer)
        self.optimizer.step()
        self.engine.after_step()
