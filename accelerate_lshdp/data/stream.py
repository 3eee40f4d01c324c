# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""IterableDataset: every rank reads the whole stream and keeps its slice of each global batch.

A worker (or the main process, without workers) cuts its stream in global batches and sends each as one `Bundle`, of
which it has collated this rank's micro-batches only. Bundles come from the workers in turn, so a global batch is made
by one worker, and what it is made of depends on the number of workers, never on the plan.

Position: each worker's samples are counted. A resumed pass reads and drops that many, without collating them, and
goes on with the worker whose turn it is, so it needs the same number of workers (0 counts as 1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate_lshdp.data.place import PlacedBatch, StreamReading
from accelerate_lshdp.data.place_writer import PlaceWriter
from accelerate_lshdp.data.position import StartPoint
from accelerate_lshdp.data.random_numbers import RandomSequence, derive_seed
from accelerate_lshdp.data.size_switch import CutSchedule


OPENING = 16
"""Samples of a worker's stream that are remembered, as a hash, to recognise it after a restart."""


def hash_samples(samples: Any) -> str:
    """The same hash for equal samples on any rank, whatever containers, tensors and arrays they are made of.

    Objects of other kinds count by their type only: their bytes and their `repr` may differ between equal ones.
    """
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(f"<{type(value).__name__}>".encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            if value.layout is torch.strided and not value.is_quantized:
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray) and value.dtype != object:
            digest.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray)):
            for item in value:
                add(item)
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            digest.update(repr(value).encode())
        elif callable(getattr(value, "tobytes", None)):
            digest.update(value.tobytes())  # an image
        digest.update(b"</>")

    add(samples)
    return digest.hexdigest()[:16]


class Bundle(NamedTuple):
    """What a worker sends: first its opening, then global batches. A named tuple, so that DataLoader can pin it."""

    worker: int
    samples: int = 0
    """Samples of the global batch over all ranks; 0: no global batch, only this worker's turn."""
    micro_batches: tuple[Any, ...] = ()
    """Collated, of this rank; empty if the global batch is skipped."""
    opening: str | None = None
    """Hash of the first samples of the stream, for this run's plan."""
    order: str | None = None
    """Hash of the first `OPENING` samples of the stream, the same for every plan."""


def pass_through(bundle: Bundle) -> Bundle:
    """Bundles are collated where they are made."""
    return bundle


class GlobalBatchStream(IterableDataset):
    """A user's stream, as one rank's bundles.

    What changes from pass to pass is in shared memory, where persistent workers see it too. The sizes are not: workers
    keep those that they were started with, without workers they may change at any global batch.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        cuts: CutSchedule,
        rank: int,
        workers: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset = dataset
        self.cuts = cuts
        self.rank = rank
        self.drop_last = drop_last
        self.collate_fn = collate_fn
        generator = getattr(dataset, "generator", None)
        self.generator_seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None
        self._pass = torch.zeros(5 + workers, dtype=torch.int64).share_memory_()

    def start_pass(self, cuts: CutSchedule, seed: int, epoch: int, start: StartPoint) -> None:
        """Set what the next iteration reads: all global batches but the first, or from a position."""
        self.cuts = cuts
        skipped = start.reading.worker_samples if start.reading else [0] * (len(self._pass) - 5)
        turn = start.reading.next_worker if start.reading else 0
        opened = start.global_batches if start.reading else 0
        self._pass.copy_(torch.tensor([seed, epoch, turn, opened, start.global_batches, *skipped]))

    def __iter__(self) -> Iterator[Bundle]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        seed, epoch, turn, opened, wanted, *skipped = self._pass.tolist()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        elif self.generator_seed is not None:
            self.dataset.generator.manual_seed(self.generator_seed + epoch)
        # The same on every rank, and apart from the main process' own: reading ahead, skipping and collating others'
        # samples or not leaves no trace in it.
        randomness = RandomSequence(derive_seed("stream", seed, epoch, worker))
        with randomness.drawing():
            stream = iter(self.dataset)
            opening = list(islice(stream, max(OPENING, self.cuts.total)))
            yield_first = Bundle(worker, opening=hash_samples(opening), order=hash_samples(opening[:OPENING]))
            stream = chain(opening, stream)
            read = sum(1 for _ in islice(stream, skipped[worker]))
        del opening
        if read < skipped[worker]:
            raise ValueError(
                f"found {read} samples in the stream of worker {worker}, expected to skip {skipped[worker]}. Resume"
                " with the dataset and the number of workers of the run that wrote the position."
            )
        yield yield_first
        if worker < turn:
            yield Bundle(worker)
        # Too large once another worker's stream has ended: then more is collated than is wanted, never less.
        global_batch = opened + (worker - turn) % workers
        while True:
            with randomness.drawing():
                samples = list(islice(stream, self.cuts.total))
            if not samples or (self.drop_last and len(samples) < self.cuts.total):
                return
            micro_batches: tuple[Any, ...] = ()
            if global_batch >= wanted:
                collating = RandomSequence(derive_seed("collate", seed, epoch, worker, read, self.rank))
                with collating.drawing():
                    micro_batches = tuple(
                        self.collate_fn([samples[i] for i in offsets] or samples[:1])
                        for offsets in self.cuts.at(global_batch).micro_batches(self.rank, len(samples))
                    )
            yield Bundle(worker, len(samples), micro_batches)
            read += len(samples)
            global_batch += workers


class StreamSource:
    """Batches of an IterableDataset, for both kinds of pass.

    Raises ValueError if the loader has no batch_size.
    """

    sampler = None
    own_batch_sampler = None

    def __init__(
        self,
        loader: DataLoader,
        make_loader: Callable[..., DataLoader],
        *,
        rank: int,
        world_size: int,
        split_batches: bool,
    ) -> None:
        if loader.batch_size is None:
            raise ValueError(
                "found a DataLoader with batch_size=None over an IterableDataset, which makes batches itself,"
                " expected one that can be cut by samples. Let the dataset yield single samples and give the"
                " DataLoader a batch_size."
            )
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self.split_batches = split_batches
        self.rank = rank
        self.workers = max(1, loader.num_workers)
        self.can_switch = loader.num_workers == 0  # worker processes have sizes of their own
        self._collate_fn = loader.collate_fn
        self._make_loader = make_loader
        self._training: DataLoader | None = None
        dataset, batch_size = loader.dataset, loader.batch_size
        if world_size > 1:
            # Shards of a `datasets` stream are not handed out to ranks: unequal shards would give unequal passes.
            dataset = IterableDatasetShard(dataset, batch_size, loader.drop_last, world_size, rank, split_batches)
            batch_size = batch_size // world_size if split_batches else batch_size
        self.base_dataloader = make_loader(dataset, batch_size=batch_size, drop_last=loader.drop_last)

    def __len__(self) -> int:
        """Samples of an epoch. Raises TypeError if the dataset has no length."""
        return len(self.dataset)

    shuffles = False  # nobody can tell

    def set_epoch(self, epoch: int) -> None:
        dataset = self.base_dataloader.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def set_seed(self, seed: int) -> None:
        """Nothing to do: the seed of a stream comes with each pass."""

    def generator_state(self) -> None:
        return None

    def set_generator_state(self, state: str | None) -> None:
        if state is not None:
            raise ValueError(
                "found a checkpoint with the state of a sampler's generator, expected one of a stream. Resume with the"
                " dataset of the run that wrote it."
            )

    def worker_seed(self, *parts: Any) -> int:
        """Equal on all ranks: they read the same stream."""
        return derive_seed("workers", *parts)

    def training_batches(
        self,
        writer: PlaceWriter,
        start: StartPoint,
        seed: int,
        agree: Callable[[str], None],
        remember_order: Callable[[str], None],
    ) -> Iterator[PlacedBatch]:
        """Yield this rank's micro-batches from `start` on, one bundle ahead of what is yielded.

        Raises ValueError if the stream ends before `start`, or `start` was reached with another number of workers.
        """
        if start.reading is not None and len(start.reading.worker_samples) != self.workers:
            raise ValueError(
                f"found a position that {len(start.reading.worker_samples)} workers had reached, expected"
                f" {self.workers} workers' (0 counts as 1): what a global batch is made of depends on them."
                " Set num_workers to it."
            )
        bundles = self._bundles(writer.cuts, seed, writer.epoch, start)
        openings = list(islice(bundles, self.workers))
        agree(hash_samples([bundle.opening for bundle in openings]))
        remember_order(hash_samples([bundle.order for bundle in openings]))
        read = list(start.reading.worker_samples) if start.reading else [0] * self.workers
        bundles = (bundle for bundle in bundles if bundle.samples)
        if start.reading is None:
            skipped = 0
            for bundle in islice(bundles, start.global_batches):
                read[bundle.worker] += bundle.samples
                skipped += 1
            if skipped < start.global_batches:
                raise ValueError(
                    f"found {skipped} global batches in the epoch, expected to skip {start.global_batches}."
                    " Skip fewer."
                )
            writer.first_sample = sum(read)
        current = next(bundles, None)
        while current is not None:
            following = next(bundles, None)
            read[current.worker] += current.samples
            reading = StreamReading(tuple(read), (current.worker + 1) % self.workers)
            places = writer.write(current.samples, last=following is None)
            # Taken out: a batch that the script has dropped must not stay alive here.
            micro_batches, current = list(current.micro_batches), following
            for place in places:
                yield PlacedBatch(micro_batches.pop(0), place, reading)

    def _bundles(self, cuts: CutSchedule, seed: int, epoch: int, start: StartPoint) -> Iterator[Bundle]:
        if self._training is None or self._training.dataset.cuts.changes != cuts.changes:
            stream = GlobalBatchStream(self.dataset, cuts, self.rank, self.workers, self.drop_last, self._collate_fn)
            self._training = self._make_loader(stream, batch_size=None, collate_fn=pass_through, wrapped=True)
        self._training.dataset.start_pass(cuts, seed, epoch, start)
        return iter(self._training)

    def evaluation_batches(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def evaluation_length(self) -> int:
        return len(self.base_dataloader)
