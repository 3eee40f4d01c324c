# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Seconds of a training step on one GPU: parameters on it, streamed through it, and under the offload of FSDP2.

    python benchmarks/streaming.py --micro-batches 16 32 --accumulation 1 4

A model of transformer blocks trains in bf16 on one GPU, by one process of its own for each way. The parts of a step
are medians of steps whose parts wait for the device; the whole step is the mean of steps that nothing interrupts,
until the last one's parameters can be read: so what a late step leaves to the next forward is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


WORDS = 8192
HEAD_WIDTH = 64
STEPS = 6
WAYS = {
    "on the GPU (ddp)": {"strategy": "ddp"},
    "streamed (lsdp)": {"strategy": "lsdp"},
    "offload of FSDP2": {"strategy": "lsdp", "intra_node": "collectives"},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.attention(self.first(x)).view(samples, length, 3, self.heads, HEAD_WIDTH)
        attended = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Network(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Clock:
    """Seconds since it was asked before, of a device that has done all its work."""

    def __init__(self) -> None:
        self.lap()

    def lap(self, model: nn.Module | None = None) -> float:
        """Seconds since the last lap; with a model, until its parameters can be read as well."""
        for parameter in () if model is None else model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach().view(-1)[:1].cpu()
        torch.cuda.synchronize()
        now = time.perf_counter()
        passed, self._last = now - getattr(self, "_last", now), now
        return passed


def measure(way: str, micro_batch: int, accumulation: int, sequence: int, width: int, blocks: int) -> dict[str, float]:
    """Seconds of a step, of its parts, and GB at the peak, in this process."""
    with torch.device("cuda"):  # where random numbers take no time
        model = Network(width, blocks)
    if WAYS[way]["strategy"] != "ddp":
        model = model.cpu()
    accelerator = LSHDPAccelerator(
        plan=Plan.from_batch_sizes([micro_batch], **WAYS[way]),
        mixed_precision="bf16",
        gradient_accumulation_steps=accumulation,
        lsdp_plugin=LSDPPlugin(loss_weighting="sample"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    samples = TensorDataset(torch.randint(0, WORDS, (micro_batch * accumulation * 2 * STEPS, sequence)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=micro_batch))
    torch.cuda.reset_peak_memory_stats()
    clock, batches = Clock(), iter(loader)
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def train(batches: Iterator[list[Tensor]], lap: Callable[[str], object]) -> None:
        for (tokens,) in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens)
                lap("forward")
                accelerator.backward(loss)
                lap("backward")
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    lap("optimizer")

    train(islice(batches, STEPS * accumulation), lambda part: parts[part].append(clock.lap()))
    clock.lap(model)
    train(batches, lambda part: None)
    found = {"step": clock.lap(model) / STEPS}
    # Without the first step, in which memory is allocated.
    found.update({name: statistics.median(seconds[1:]) for name, seconds in parts.items()})
    return {**found, "peak": torch.cuda.max_memory_allocated() / 1e9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16, 32], help="samples of a micro-batch")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1], help="micro-batches of a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("found no CUDA device, expected one: host memory is device memory without")
    shape = [arguments.sequence, arguments.width, arguments.blocks]
    if arguments.way is not None:
        print(json.dumps(measure(arguments.way, arguments.micro_batches[0], arguments.accumulation[0], *shape)))
        return 0
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Network(arguments.width, arguments.blocks).parameters())
    table = Table(
        "tokens", "micro-batches", "parameters", "step (s)", "forward", "backward", "optimizer", "peak (GB)",
        title=f"{parameters / 1e6:.0f} M parameters on one {torch.cuda.get_device_name()}, {torch.get_num_threads()} "
        "threads",
    )  # fmt: skip
    for micro_batch, accumulation in product(arguments.micro_batches, arguments.accumulation):
        for way in WAYS:
            case = ["--way", way, "--micro-batches", str(micro_batch), "--accumulation", str(accumulation)]
            command = [sys.executable, __file__, *sys.argv[1:], *case]
            ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(ended.stdout.splitlines()[-1])
            seconds = [f"{found[name]:.4f}" for name in ("step", "forward", "backward", "optimizer")]
            tokens = str(micro_batch * arguments.sequence)
            print(f"{tokens} tokens, {accumulation} micro-batches, {way}: {found['step']:.4f} s", file=sys.stderr)
            table.add_row(tokens, str(accumulation), way, *seconds, f"{found['peak']:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
