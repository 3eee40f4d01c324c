# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The order in which a map-style loader reads its samples: the same on every rank, for every plan and after a restart.

Four kinds of order are told apart:

* a plain `RandomSampler` without a generator is replaced by `EpochSeededSampler` (seed + epoch);
* a sampler with a generator of the user's keeps it, as in torch: its state at the start of a pass is what a checkpoint
  holds, and ranks whose generators differ are caught at the start of the pass;
* another sampler with an empty `generator` attribute (`SubsetRandomSampler`, `WeightedRandomSampler`) gets one seeded
  with seed + epoch;
* anything else is taken as it is. Its `set_epoch` is called, and that its order is the same on all ranks, and the same
  again after a restart, is checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler


OPENING = 64
"""Indices of an epoch that are remembered, as a hash, to recognise its order after a restart."""


def hash_indices(indices: Iterable[Any]) -> str:
    """The same hash for equal indices, whether they are ints, numpy or torch scalars, or keys."""
    plain = [index.item() if hasattr(index, "item") else index for index in indices]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


class EpochSeededSampler(SeedableRandomSampler):
    """accelerate's seedable sampler, drawn on the CPU whatever the default device: all nodes get the same order.

    Unlike its parent it does not count epochs itself: the loader says which epoch it is.
    """

    def __iter__(self) -> Iterator[int]:
        with torch.device("cpu"):
            self.generator = torch.Generator().manual_seed(self.initial_seed + self.epoch)
            return iter(list(RandomSampler.__iter__(self)))


class SampleOrder:
    """The sampler or batch sampler of a user's loader, as one stream of indices.

    Raises ValueError if the loader has neither (`batch_size=None` without a `BatchSampler`).
    """

    def __init__(self, loader: DataLoader, seed: int) -> None:
        self.reads_whole_batches = isinstance(loader.sampler, BatchSampler)
        batch_sampler = loader.sampler if self.reads_whole_batches else loader.batch_sampler
        if batch_sampler is None:
            raise ValueError(
                "found a DataLoader with batch_size=None, whose dataset makes the batches itself, expected one that"
                " can be cut by samples. Let the dataset return single samples and give the DataLoader a batch_size."
            )
        self.seed = seed
        self.dataset = loader.dataset
        self.sampler = getattr(batch_sampler, "sampler", None)
        # The DataLoader draws one number of a generator that it shares with its sampler before the sampler draws.
        self._shares_generator = loader.generator is not None and loader.generator is self._generator
        self.is_seeded = False
        if type(self.sampler) is RandomSampler and self.sampler.generator is None:
            self.sampler = EpochSeededSampler(
                self.sampler.data_source,
                replacement=self.sampler.replacement,
                num_samples=self.sampler._num_samples,
                data_seed=seed,
            )
            self.is_seeded = True
            if type(batch_sampler) is BatchSampler:
                batch_sampler = BatchSampler(self.sampler, batch_sampler.batch_size, batch_sampler.drop_last)
            else:
                batch_sampler.sampler = self.sampler
        self.batch_sampler = batch_sampler
        self._seeds_generator = (
            not self.is_seeded
            and hasattr(self.sampler, "generator")
            and self.sampler.generator is None
            and not hasattr(self.sampler, "set_epoch")
        )

    @property
    def _generator(self) -> torch.Generator | None:
        """The user's generator, where the order comes from one."""
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) and not hasattr(self.sampler, "set_epoch") else None

    def set_seed(self, seed: int) -> None:
        """Use the seed that a checkpoint holds."""
        self.seed = seed
        if self.is_seeded:
            self.sampler.initial_seed = seed

    def set_epoch(self, epoch: int) -> None:
        for part in (self.batch_sampler, self.sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if self._seeds_generator:
            self.sampler.generator = torch.Generator().manual_seed(self.seed + epoch)

    def generator_state(self) -> str | None:
        """The state of the user's generator in hexadecimal; None where the order does not come from one."""
        if self._generator is None or self._seeds_generator:
            return None
        return self._generator.get_state().numpy().tobytes().hex()

    def set_generator_state(self, state: str | None) -> None:
        if (state is None) != (self.generator_state() is None):
            raise ValueError(
                f"found a checkpoint {'without' if state is None else 'with'} the state of a sampler's generator,"
                f" expected one {'with' if state is None else 'without'} it. Shuffle as in the run that wrote it (the"
                " same sampler, with a generator or without)."
            )
        if state is not None:
            self._generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))

    def begin_pass(self) -> None:
        """Draw what the DataLoader would have drawn from the generator that it shares with its sampler."""
        if self._shares_generator:
            torch.empty((), dtype=torch.int64, device=self._generator.device).random_(generator=self._generator)

    def indices(self) -> Iterator[Any]:
        """The indices of one epoch. A user's batch sampler is read in order, whatever the sizes of its batches."""
        if type(self.batch_sampler) is BatchSampler:
            # Not through the batch sampler, which may drop its last batch: only a global batch may be dropped.
            yield from self.sampler
        else:
            for batch in self.batch_sampler:
                yield from batch

    def __len__(self) -> int:
        """Samples of an epoch; for a batch sampler of the user's that does not say, its batches x batch_size at most.

        Raises TypeError if the length cannot be known.
        """
        if type(self.batch_sampler) is BatchSampler:
            return len(self.sampler)
        # What the batch sampler reads may not be told: the number of batches says whether it is all of the data.
        batch_size = getattr(self.batch_sampler, "batch_size", None)
        if not isinstance(batch_size, int):
            raise TypeError(
                f"the number of samples of {type(self.batch_sampler).__name__} is unknown: it has no batch_size. Give"
                " it a batch_size attribute, or do not take len() of this loader."
            )
        batches = len(self.batch_sampler)
        for data in (self.sampler, self.dataset):
            if hasattr(data, "__len__") and -(-len(data) // batch_size) == batches:
                return len(data)
        return batches * batch_size
