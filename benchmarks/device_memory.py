# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The memory that random placements take on devices, beside what the placement planner predicts for them.

    python benchmarks/device_memory.py --nodes 1,1 --jobs 25
    python benchmarks/device_memory.py --nodes 2,2 --uniform

Each job is a small transformer with random sizes, placements, micro-batches and precision; with `--uniform` one of
42 M parameters (12 blocks of 512 features, 4 samples of 64 tokens a rank), all of whose blocks have one placement. It
is trained for three steps on emulated devices (`tests/emulated_device`), whose allocator counts as CUDA's does, with
the AdamW that torch chooses there. Predicted are the bytes of a plan, and 4 kB a parameter that sizes are rounded up
by. Each device has as much memory as is predicted for it, and no more: a job that needs more ends with an error, and
this program with it. It needs a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
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
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.options import pose_placement
from accelerate_lshdp.planning.placement.traffic import offered_stores
from accelerate_lshdp.profiling.unit_sizes import measure_on_fakes


STEPS = 3
#: Bytes in whose multiples the device gives memory, as CUDA does.
ROUNDED_TO = 512
#: Tensors that each parameter has at most: itself, gathered, its gradient, two moments, and what its step computes.
_OF_A_PARAMETER = 8
#: Of a batch: tokens, and numbers of the loss.
_OF_A_BATCH = 64
_LARGEST = 64


class Block(nn.Module):
    """Causal attention and a perceptron, each beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        parts = self.attention(self.first(x)).view(samples, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4)
        scores = (parts[0] @ parts[1].transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ parts[2]).transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """A language model whose head is not tied to its embedding."""

    def __init__(self, blocks: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return {"loss": functional.cross_entropy(logits, input_ids[:, 1:].flatten()), "logits": logits}


def cluster_of(nodes: tuple[int, ...]) -> PlacementCluster:
    """Devices without limits; the seconds are of no meaning."""
    world, link = sum(nodes), LinkCost(1e-4, 1e-9)
    profile = RankProfile(TimeCurve((1, _LARGEST), (1.0, float(_LARGEST))), _LARGEST)
    return PlacementCluster(nodes, (profile,) * world, (2**40,) * world, link, link, device_link=link)


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        nodes: ranks of each node.
        blocks: of the model.
        width: of the model.
        vocabulary: of the model.
        tokens: of a sample.
        micro_batches: samples of each rank's.
        accumulation: micro-batches of a step.
        precision: mixed precision.
        placement: of the units.
    """

    nodes: tuple[int, ...]
    blocks: int
    width: int
    vocabulary: int
    tokens: int
    micro_batches: tuple[int, ...]
    accumulation: int
    precision: str
    placement: ModelPlacement

    def model(self) -> Transformer:
        torch.manual_seed(0)
        return Transformer(self.blocks, self.width, self.vocabulary)

    def tokens_of(self, samples: int) -> torch.Tensor:
        return torch.randint(self.vocabulary, (samples, self.tokens), generator=torch.Generator().manual_seed(samples))

    def sizes(self) -> ModelSizes:
        units = measure_on_fakes(
            self.model(),
            [self.tokens_of(2), self.tokens_of(4)],
            (2, 4),
            lambda model, tokens: model(tokens)["loss"],
            device=torch.device("emulated"),
            mixed_precision=self.precision,
            autocast=lambda: autocast(self.precision),
        )
        return ModelSizes.of(units)

    def predicted(self) -> list[int]:
        """Bytes of each rank on its device; to be called where there is one, whose operations are those counted."""
        sizes = self.sizes()
        problem = pose_placement(sizes, cluster_of(self.nodes), self.micro_batches, self.accumulation)
        counts = [
            [sum(self.placement.of(unit) == option.placement for unit in kind.units) for option in kind.options]
            for kind in problem.kinds
        ]
        assert all(sum(each) == len(kind.units) for each, kind in zip(counts, problem.kinds, strict=True))
        by_rank = problem.by_rank(problem.memory(counts))
        # Beside it: what sizes are rounded up to, and the batch.
        beside = ROUNDED_TO * (_OF_A_PARAMETER * len(list(self.model().parameters())) + _OF_A_BATCH)
        return [needed + beside for needed, _ in by_rank.values()]

    def __str__(self) -> str:
        sizes = f"{self.blocks} x {self.width}, {self.vocabulary} words, {self.tokens} tokens"
        return f"{sizes}, {self.micro_batches} x {self.accumulation} samples, {self.precision}: {self.placement}"


def autocast(precision: str) -> Any:
    return contextlib.nullcontext() if precision == "no" else torch.autocast("emulated", dtype=torch.bfloat16)


def random_job(seed: int, nodes: tuple[int, ...]) -> Job:
    rng = random.Random(seed)
    blocks = rng.randint(2, 6)
    return Job(
        nodes,
        blocks,
        width=rng.choice((128, 256, 384)),
        vocabulary=rng.choice((256, 1024, 4096)),
        tokens=rng.choice((16, 64, 128)),
        micro_batches=tuple(rng.randint(1, 6) for _ in range(sum(nodes))),
        accumulation=rng.choice((1, 1, 2)),
        precision=rng.choice(("no", "no", "bf16")),
        placement=_random_placement(rng, blocks, cluster_of(nodes)),
    )


def _random_placement(rng: random.Random, blocks: int, cluster: PlacementCluster) -> ModelPlacement:
    """Runs of blocks that are kept alike, and the root in some other way."""

    def drawn(stores: Sequence[UnitStore], checkpoint: bool, name: str) -> UnitPlacement:
        store = rng.choice(stores)
        slices = rng.choice((1, 1, 2, 4)) if store.takes_slices(name) else 1
        return UnitPlacement(store, checkpoint=checkpoint, slices=slices)

    units = {"": drawn(offered_stores(cluster, is_root=True), False, "")}
    for block in range(blocks):
        if block == 0 or rng.random() < 0.4:
            own = drawn(offered_stores(cluster, is_root=False), rng.random() < 0.3, f"blocks.{block}")
        units[f"blocks.{block}"] = own
    return ModelPlacement(tuple(units.items()))


def uniform_jobs(nodes: tuple[int, ...]) -> list[Job]:
    """One for each store that blocks may have, with and without recomputing their activations."""
    of_root, of_blocks = (offered_stores(cluster_of(nodes), is_root=is_root) for is_root in (True, False))
    jobs = []
    for store in of_blocks:
        for checkpoint in (False, True):
            placements = {f"blocks.{block}": UnitPlacement(store, checkpoint=checkpoint) for block in range(12)}
            placements[""] = UnitPlacement(store if store in of_root else UnitStore.WORLD)
            placement = ModelPlacement(tuple(placements.items()))
            jobs.append(Job(nodes, 12, 512, 4096, 64, (4,) * sum(nodes), 1, "no", placement))
    return jobs


def train(job: Job, share: float = 1) -> dict[str, int]:
    """The bytes of this rank's device that are predicted, and the most that backwards and optimizer steps take.

    Args:
        job: what is trained.
        share: of what is predicted that the device has.

    Raises:
        torch.OutOfMemoryError: it does not have as much as is taken.
    """
    import torch_device as device

    rank, predicted = dist.get_rank(), job.predicted()
    device.synchronize()
    before = device.counts()["device_bytes"]
    device.configure(limit=before + int(share * predicted[rank]))
    training = Training(job.model(), job.placement, job.nodes, job.precision)
    most = {"predicted": predicted[rank], "backward": 0, "step": 0}

    def note(what: str) -> None:
        device.synchronize()
        most[what] = max(most[what], device.counts()["peak_device_bytes"] - before)
        torch.emulated.reset_peak_memory_stats()

    torch.emulated.reset_peak_memory_stats()
    for _ in range(STEPS):
        for number in range(job.accumulation):
            tokens = job.tokens_of(job.micro_batches[rank]).to("emulated")
            with autocast(job.precision):
                outputs = training.prepared.module(tokens)
            training.backward(outputs["loss"], synchronise=number == job.accumulation - 1)
        note("backward")
        training.step()
        note("step")
        training.optimizer.zero_grad()
        # `outputs` and `tokens` are held until the next ones are there, as in a loop of a script.
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,1", help="ranks on each node (default: 1,1)")
    parser.add_argument("--jobs", type=int, default=25, help="number of random trainings (default: 25)")
    parser.add_argument("--uniform", action="store_true", help="placements of one kind, not random ones")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    options = parser.parse_args()
    nodes = tuple(map(int, options.nodes.split(",")))
    shares: dict[str, list[float]] = {"backward": [], "step": [], "whole step": []}
    seeds = range(options.first, options.first + options.jobs)
    jobs = uniform_jobs(nodes) if options.uniform else [random_job(seed, nodes) for seed in seeds]
    for number, job in enumerate(jobs, options.first):
        print(f"    {job}", file=sys.stderr, flush=True)
        found = on_ranks(train, sum(nodes), job)
        for each in found:
            each["whole step"] = max(each["backward"], each["step"])
        for what, of_all in shares.items():
            own = [each[what] / each["predicted"] for each in found]
            of_all += own
            print(f"{number}, {what}:", *(f"{share:.3f}" for share in own), file=sys.stderr, flush=True)
    table = Table("taken / predicted", "ranks", "least", "median", "most", title=f"nodes {options.nodes}")
    for what, of_all in shares.items():
        figures = [min(of_all), statistics.median(of_all), max(of_all)]
        table.add_row(what, str(len(of_all)), *(f"{figure:.3f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
