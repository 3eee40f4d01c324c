# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Heterogeneous loaders without processes: one fake context a rank, whose agreements are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accelerate_lshdp.data.place import PlacedBatch
from accelerate_lshdp.data.prepare import HeterogeneousDataLoader, MicroBatchPlace, prepare_loader
from accelerate_lshdp.documents.plan import RankBatch


class Disagreement(RuntimeError):
    pass


class FakeContext:
    """One rank's accelerator. `shared` holds the digests of the ranks so far, in the order of the calls."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        rank_batches: tuple[RankBatch, ...] | None,
        shared: list[str],
        *,
        seed: int = 7,
        g: int = 1,
        sync_with_dataloader: bool = True,
        token_counter: Callable[[Any], int] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.rank_batches = rank_batches
        self.seed = seed
        self.gradient_accumulation_steps = g
        self.sync_with_dataloader = sync_with_dataloader
        self.token_counter = token_counter
        self.follows_script = False
        self.expects_training = False
        self.evaluating = False
        self.shared = shared
        self.calls = 0
        self.events: list[str] = []
        self.places: list[MicroBatchPlace] = []
        self.running: HeterogeneousDataLoader | None = None
        """What runs the training pass in progress: a loader or a view of it."""

    def is_evaluation_pass(self) -> bool:
        return self.evaluating

    def check_agreement(self, digest: str, what: str) -> None:
        if self.calls == len(self.shared):
            self.shared.append(digest)
        expected = self.shared[self.calls]
        self.calls += 1
        if digest != expected:
            raise Disagreement(f"{what}: {digest} is not {expected}")

    def begin_pass(self, loader: Any) -> None:
        self.events.append(f"begin {'evaluation' if loader.is_evaluating else 'training'}")
        if not loader.is_evaluating:
            self.running = loader

    def end_pass(self, loader: Any) -> None:
        self.events.append("end")
        if not loader.is_evaluating:
            self.running = None  # no cycle, which would leave persistent workers to the garbage collector

    def reports_training(self) -> bool:
        return False

    def batch_yielded(self, loader: Any, placed: PlacedBatch) -> None:
        self.events.append("yield")
        self.places.append(placed.place)


def rank_batches(sizes: Sequence[int | tuple[int, int]] | None) -> tuple[RankBatch, ...] | None:
    """[3, (2, 4)]: rank 0 reads one micro-batch of 3 samples, rank 1 four of 2."""
    if sizes is None:
        return None
    pairs = [(size, 1) if isinstance(size, int) else size for size in sizes]
    return tuple(RankBatch(rank, size, steps) for rank, (size, steps) in enumerate(pairs))


def prepare(
    make_loader: Callable[[], DataLoader],
    sizes: Sequence[int | tuple[int, int]] | None,
    *,
    world_size: int | None = None,
    evaluating: bool = False,
    context: dict[str, Any] | None = None,
    **options: Any,
) -> list[HeterogeneousDataLoader]:
    """The prepared loader of every rank; its context is `loader._context`."""
    batches = rank_batches(sizes)
    world_size = len(batches) if batches is not None else world_size
    shared: list[str] = []
    loaders = []
    for rank in range(world_size):
        fake = FakeContext(rank, world_size, batches, shared, **(context or {}))
        fake.evaluating = evaluating
        loaders.append(prepare_loader(make_loader(), fake, **{"put_on_device": False, **options}))
    return loaders


def read(loader: HeterogeneousDataLoader, batches: int | None = None) -> list[tuple[Any, MicroBatchPlace]]:
    """What a training pass yields (at most `batches` of it), with the places that the context was told."""
    result = []
    for batch in loader:
        result.append((batch, loader._context.places[-1]))
        if len(result) == batches:
            break
    return result


def real(pairs: Sequence[tuple[torch.Tensor, MicroBatchPlace]]) -> list[int]:
    """The samples that count, in the order of reading."""
    return [sample for batch, place in pairs if place.samples for sample in batch.tolist()]


def by_global_batch(passes: Sequence[Sequence[tuple[torch.Tensor, MicroBatchPlace]]]) -> list[list[int]]:
    """The samples of each global batch, ranks in order."""
    result: dict[int, list[int]] = {}
    for pairs in passes:
        for batch, place in pairs:
            samples = result.setdefault(place.global_batch, [])
            samples.extend(batch.tolist() if place.samples else [])
    return [result[index] for index in sorted(result)]


class Augmented(Dataset):
    """(index, three numbers drawn from the three global generators)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), *draw()], dtype=torch.float64)


class Stream(IterableDataset):
    """0 .. length - 1, dealt to the workers in turn, each with the three numbers of `draw` if `augmented`."""

    def __init__(self, length: int, *, augmented: bool = False, offset: int = 0) -> None:
        self.length = length
        self.augmented = augmented
        self.offset = offset

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(worker, self.length, workers):
            value = index + self.offset
            yield torch.tensor([float(value), *draw()], dtype=torch.float64) if self.augmented else torch.tensor(value)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


def draw() -> list[float]:
    import random

    import numpy as np

    return [random.random(), float(np.random.rand()), float(torch.rand(()))]
