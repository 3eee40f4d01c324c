# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Map-style data: one stream of indices, cut in global batches, of which each rank reads its own slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader

from accelerate_lshdp.data.order import OPENING, SampleOrder, hash_indices
from accelerate_lshdp.data.place import MicroBatchPlace, PlacedBatch
from accelerate_lshdp.data.place_writer import PlaceWriter
from accelerate_lshdp.data.position import StartPoint
from accelerate_lshdp.data.random_numbers import SeededDataset, SeededIndices, derive_seed
from accelerate_lshdp.data.sampler_checks import own_batch_sampler


def global_batches(indices: Iterator[Any], total: int, drop_last: bool) -> Iterator[tuple[list[Any], bool]]:
    """Cut a stream of indices in lists of `total`, each with "is the last"; the last may be shorter, or is dropped.

    Reads one list of indices ahead, never a sample.
    """
    current = list(islice(indices, total))
    while current and not (drop_last and len(current) < total):
        following = list(islice(indices, total))
        last = not following or (drop_last and len(following) < total)
        yield current, last
        current = [] if last else following


def write_index_lists(
    whole: Iterator[tuple[list[Any], bool]], writer: PlaceWriter, places: deque[MicroBatchPlace], seed: int | None
) -> Iterator[list[Any] | SeededIndices]:
    """One rank's lists of these global batches, one a micro-batch, whose places are appended to `places`.

    With a seed, the lists are for a `SeededDataset`. No method of `MapSource`, to which a pass that is left would then
    refer: in a cycle of garbage, torch waits 5 seconds for each persistent worker.
    """
    # Workers are sent these lists in order and their batches come back in order (in_order=True is required), so
    # places written here line up with batches however far the workers are ahead.
    for samples, last in whole:
        micro_batches = writer.cuts.at(writer.global_batch).micro_batches(writer.rank, len(samples))
        written = writer.write(len(samples), last=last, samples_hash=int(hash_indices(samples)[:12], 16))
        for offsets, place in zip(micro_batches, written, strict=True):
            places.append(place)
            read = [samples[i] for i in offsets] or samples[:1]
            position = place.first_sample + (offsets.start if offsets else 0)
            yield read if seed is None else SeededIndices(read, seed, position)


class HeterogeneousBatchSampler(BatchSampler):
    """Index lists of one rank, for the pass that is starting: its own in training, those of stock in evaluation.

    One sampler serves both kinds of pass, so that persistent workers serve both too. Iterating it outside a pass, as a
    loader that is rebuilt around it would, raises RuntimeError: it would read equal batches where uneven ones are due.
    """

    def __init__(
        self, batch_sampler: BatchSampler, *, rank: int, world_size: int, split_batches: bool, even_batches: bool
    ) -> None:
        self.batch_sampler = batch_sampler
        self.process_index = rank
        self.num_processes = world_size
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self._starting: Iterator[Any] | None = None

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        return len(self.batch_sampler)

    def _evaluation(self) -> BatchSampler:
        if self.num_processes == 1:
            return self.batch_sampler
        return BatchSamplerShard(
            self.batch_sampler, self.num_processes, self.process_index, self.split_batches, self.even_batches
        )

    @contextmanager
    def starting(self, index_lists: Iterator[Any] | None) -> Iterator[None]:
        """While a DataLoader starts a pass: hand out these lists, or those of stock accelerate (None: evaluation)."""
        # One iterator, made once: with workers, a DataLoader asks for it twice and uses the second.
        self._starting = iter(self._evaluation()) if index_lists is None else index_lists
        try:
            yield
        finally:
            self._starting = None

    def __iter__(self) -> Iterator[Any]:
        if self._starting is None:
            raise RuntimeError(
                "found an iteration over the sampler of a prepared loader, expected one over the loader. To skip"
                " batches use LSHDPAccelerator.skip_first_batches (accelerate's own function rebuilds the loader, and"
                " loses the plan)."
            )
        return self._starting

    def __len__(self) -> int:
        return len(self._evaluation())


class MapSource:
    """Batches of a map-style dataset, for both kinds of pass."""

    can_switch = True  # sizes are asked for in this process, whoever reads the samples

    def __init__(
        self,
        loader: DataLoader,
        order: SampleOrder,
        make_loader: Callable[..., DataLoader],
        *,
        rank: int,
        world_size: int,
        split_batches: bool,
        even_batches: bool,
    ) -> None:
        self.order = order
        self.rank = rank
        self.split_batches = split_batches
        self.index_lists = HeterogeneousBatchSampler(
            order.batch_sampler,
            rank=rank,
            world_size=world_size,
            split_batches=split_batches,
            even_batches=even_batches,
        )
        self.batch_size = self.index_lists.batch_size
        self.drop_last = self.index_lists.drop_last
        self.own_batch_sampler = own_batch_sampler(loader)
        self.dataset = loader.dataset
        self._seeds_samples = loader.num_workers > 0
        sampling = (
            {"sampler": self.index_lists, "batch_size": None}
            if order.reads_whole_batches
            else {"batch_sampler": self.index_lists}
        )
        dataset = SeededDataset(loader.dataset) if self._seeds_samples else loader.dataset
        self.base_dataloader = make_loader(dataset, wrapped=self._seeds_samples, **sampling)

    def __len__(self) -> int:
        """Samples of an epoch. Raises TypeError if they cannot be known."""
        return len(self.order)

    @property
    def sampler(self) -> Any:
        return self.order.sampler

    def batches_and_samples(self) -> tuple[int, int] | None:
        """Batches of the script's batch sampler and samples in an epoch; None if they are not told."""
        data = self.order.sampler if hasattr(self.order.sampler, "__len__") else self.dataset
        try:
            return len(self.order.batch_sampler), len(data)
        except (TypeError, NotImplementedError):
            return None

    @property
    def shuffles(self) -> bool:
        """Whether the order is drawn at random, as far as the sampler tells: what is trained on mostly is."""
        return hasattr(self.order.sampler, "generator")

    def set_seed(self, seed: int) -> None:
        self.order.set_seed(seed)

    def generator_state(self) -> str | None:
        return self.order.generator_state()

    def set_generator_state(self, state: str | None) -> None:
        self.order.set_generator_state(state)

    def worker_seed(self, *parts: Any) -> int:
        return derive_seed("workers", self.rank, *parts)

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def training_batches(
        self,
        writer: PlaceWriter,
        start: StartPoint,
        seed: int,
        agree: Callable[[str], None],
        remember_order: Callable[[str], None],
    ) -> Iterator[PlacedBatch]:
        """Yield this rank's micro-batches from `start` on.

        `agree` is called once, with a hash of the order, and raises if ranks differ; `remember_order` is called once
        with a hash that does not depend on the plan.

        Raises ValueError if the epoch is shorter than `start`.
        """
        self.order.begin_pass()
        indices = self.order.indices()
        opening = list(islice(indices, max(OPENING, writer.cuts.total)))
        agree(hash_indices(opening))
        remember_order(hash_indices(opening[:OPENING]))
        indices = chain(opening, indices)
        skipped = sum(1 for _ in islice(indices, start.samples))
        if skipped < start.samples:
            raise ValueError(
                f"found {skipped} samples in the epoch, expected to skip {start.samples}. Resume with the dataset and"
                " sampler of the run that wrote the position, or skip fewer batches."
            )
        places: deque[MicroBatchPlace] = deque()
        sample_seed = derive_seed("samples", seed, writer.epoch) if self._seeds_samples else None
        whole = global_batches(indices, writer.cuts.total, self.drop_last)
        with self.index_lists.starting(write_index_lists(whole, writer, places, sample_seed)):
            batches = iter(self.base_dataloader)
        for batch in batches:
            yield PlacedBatch(batch, places.popleft(), None)

    def evaluation_batches(self) -> Iterator[Any]:
        self.order.begin_pass()
        with self.index_lists.starting(None):
            return iter(self.base_dataloader)

    def evaluation_length(self) -> int:
        return len(self.index_lists)
