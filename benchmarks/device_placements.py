# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Samples a second of planned placements against uniform ones, on devices that have the memory that was planned with.

    python benchmarks/device_placements.py

Two nodes of one emulated device each (`tests/emulated_device`) train a model of equal blocks. A block computes by
sleeping for each sample, its activations are memory that nothing computes, and exchanges and copies take as long as
the emulated rates say. So the figures show what placements do with memory, links and order, not the speed of anything.
Each placement, planned or uniform, has the batch size that the planner found best for it; planned ones may use slices,
too. It needs a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from emulated_ranks import Training, on_ranks
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from accelerate_lshdp.documents.curves import RankProfile, TimeCurve
from accelerate_lshdp.documents.network import LinkCost
from accelerate_lshdp.documents.placement import ModelPlacement, UnitStore
from accelerate_lshdp.planning import PlanningError
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.planner import Choice, plan_placement
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.profiling.unit_sizes import measure_on_fakes


NODES = (1, 1)
BLOCKS, WIDTH = 12, 256
LARGEST = 16  # samples of a micro-batch
STEPS = 4
#: Bytes that a rank needs beside what is planned: its batch, and what sizes are rounded up to.
PROCESS_BYTES = 2**20
UNIFORM = (UnitStore.REPLICATE, UnitStore.WORLD, UnitStore.WORLD_KEPT, UnitStore.HOST)


@dataclass(frozen=True)
class Setting:
    """What is emulated.

    Attributes:
        compute: seconds of a block's forward for one sample; the backward takes twice as long.
        activations: bytes that a block keeps for one sample.
        link: bytes a second between the nodes.
        copies: bytes a second between a device and its host, each way.
        limit: bytes of a device.
    """

    compute: float
    activations: int
    link: float
    copies: float
    limit: int


class Work(torch.autograd.Function):
    """Keeps the device busy and memory for the backward, as a block's operators do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.seconds = 2 * block.work(x)
        ctx.save_for_backward(x.new_empty(len(x), block.activations // x.itemsize))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.saved_tensors  # noqa: B018 - as who computes again what was kept does it when it is asked for
        _sleep(gradient, ctx.seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.seconds, self.activations = setting.compute, setting.activations

    def work(self, x: torch.Tensor) -> float:
        """Computes, and returns how long that takes."""
        seconds = self.seconds * len(x)
        _sleep(x, seconds)
        return seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Work.apply(self.down(functional.gelu(self.up(x))), self)


class Network(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _sleep(x: torch.Tensor, seconds: float) -> None:
    if x.device.type == "emulated":
        import torch_device

        torch_device.sleep(seconds)


# What is planned


def sizes_of(setting: Setting) -> ModelSizes:
    units = measure_on_fakes(
        Network(setting),
        [torch.zeros(samples, WIDTH) for samples in (2, 4)],
        (2, 4),
        loss_of,
        device=torch.device("cpu"),
        mixed_precision="no",
        autocast=contextlib.nullcontext,
    )
    return ModelSizes.of(units)


def cluster_of(setting: Setting, hosts: bool) -> PlacementCluster:
    points = (1, LARGEST)
    curve = TimeCurve(points, [3 * setting.compute * BLOCKS * samples for samples in points])
    profile = RankProfile(curve, LARGEST)
    return PlacementCluster(
        NODES,
        (profile,) * len(NODES),
        (setting.limit,) * len(NODES),
        LinkCost(1e-3, 1 / setting.link),
        LinkCost(0.0, 0.0),
        device_link=LinkCost(1e-4, 1 / setting.copies) if hosts else None,
        process_bytes=PROCESS_BYTES,
    )


def plans_of(setting: Setting) -> dict[str, PlacementResult | None]:
    """By name: the planned placements, and the uniform ones; None: it does not fit."""
    model = sizes_of(setting)
    devices, all_memory = (cluster_of(setting, hosts) for hosts in (False, True))
    choices = {
        "planned": (all_memory, Choice()),
        "planned, without host memory": (devices, Choice()),
    }
    for store in UNIFORM:
        for checkpoint in (False, True):
            cluster = all_memory if store is UnitStore.HOST else devices
            name = f"{store}{', recomputed' if checkpoint else ''}"
            choices[name] = (cluster, Choice((store,), (checkpoint,), (1,)))
    plans: dict[str, PlacementResult | None] = {}
    for name, (cluster, choice) in choices.items():
        try:
            plans[name] = plan_placement(model, cluster, choice=choice)
        except PlanningError:
            plans[name] = None
    return plans


# What is measured


def train(setting: Setting, placement: ModelPlacement, samples: Sequence[int]) -> tuple[list[float], int]:
    """Seconds of this rank's steps, and the most memory that it has taken."""
    import torch_device as device

    torch.manual_seed(0)
    device.configure(to_device=setting.copies, to_host=setting.copies, to_ranks=setting.link, limit=setting.limit)
    training = Training(Network(setting), placement, NODES)
    x = torch.randn(samples[dist.get_rank()], WIDTH).to("emulated")
    seconds = []
    for _ in range(STEPS):
        device.synchronize()
        dist.barrier()
        began = time.perf_counter()
        training.backward(loss_of(training.prepared.module, x))
        training.step()
        training.optimizer.zero_grad()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, device.counts()["peak_device_bytes"]


def measure(setting: Setting, plan: PlacementResult) -> tuple[float, float]:
    """Seconds of a step, the median of some, and the most memory of a rank as a share of what was planned."""
    samples = [size for size, _ in plan.micro_batches]
    found = on_ranks(train, len(NODES), setting, plan.placement, samples)
    seconds = [max(each) for each in zip(*(seconds for seconds, _ in found), strict=True)]
    shares = [peak / planned for (_, peak), planned in zip(found, plan.predicted.memory_bytes, strict=True)]
    return statistics.median(seconds[1:]), max(shares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=float, default=0.014, help="seconds of a block's forward for one sample")
    parser.add_argument("--activations", type=float, default=1.5, help="MB that a block keeps for one sample")
    parser.add_argument("--link", type=float, default=16.0, help="MB a second between the nodes")
    parser.add_argument("--copies", type=float, default=160.0, help="MB a second between device and host")
    parser.add_argument("--limit", type=float, default=125.0, help="MB of a device")
    options = parser.parse_args()
    setting = Setting(
        options.compute,
        int(options.activations * 1e6),
        options.link * 1e6,
        options.copies * 1e6,
        int(options.limit * 1e6),
    )
    table = Table("placement", "samples", "step, s", "predicted / step", "samples/s", "memory / planned")
    for name, plan in plans_of(setting).items():
        if plan is None:
            table.add_row(name, "", "does not fit")
            continue
        seconds, share = measure(setting, plan)
        total = sum(size for size, _ in plan.micro_batches)
        predicted = plan.predicted.step_seconds
        row = [str(total), f"{seconds:.3f}", f"{predicted / seconds:.2f}", f"{total / seconds:.2f}"]
        print(name, row, f"{share:.2f}", plan.placement, file=sys.stderr, flush=True)
        table.add_row(name, *row, f"{share:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
