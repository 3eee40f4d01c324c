# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Random numbers of data loading: derived from the seed, the epoch and the sample, never from how far something ran.

Worker processes draw with Python's, numpy's and torch's global generators. Seeded once a pass, as torch does, a sample
would depend on the batches that its worker read before, hence on the plan and on where the pass started. So each
sample of a training pass is seeded by its position in the epoch (each micro-batch, if the dataset fetches a batch at
once), and each worker of a stream replays one random sequence.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info


def derive_seed(*parts: Any) -> int:
    """A seed in [0, 2**62) that depends on every part; other parts give an unrelated one."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2


def seed_generators(seed: int) -> None:
    """Seed the global generators on the CPU. Not `torch.manual_seed`, which also queues a call for every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class RandomSequence:
    """A random sequence of its own for code that draws from the global generators, inside `drawing`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, ...] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        outer = self._get()
        if self._state is None:
            seed_generators(self._seed)
        else:
            self._set(self._state)
        try:
            yield
        finally:
            self._state = self._get()
            self._set(outer)

    @staticmethod
    def _get() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(), torch.default_generator.get_state()

    @staticmethod
    def _set(state: tuple[Any, ...]) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.default_generator.set_state(state[2])


@contextmanager
def kept_random_numbers(device: torch.device) -> Iterator[None]:
    """Afterwards all generators of random numbers are as if nothing inside had drawn from them."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_forked(device)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def _forked(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # without devices the host's generator alone is kept


class SeededIndices(NamedTuple):
    """The indices of a micro-batch, for `SeededDataset`."""

    indices: list[Any]
    seed: int
    """Of the pass."""
    position: int
    """Of the first index in its epoch; the others follow it."""


def _fetches_batches(dataset: Any) -> bool:
    if type(dataset) is Subset:
        # A Subset always has __getitems__, and falls back to single samples itself.
        return _fetches_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


class SeededDataset(Dataset):
    """A user's dataset as worker processes read it: seeded for each sample. Plain indices are read as without it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, SeededIndices):
            return self.dataset[index]
        seed_generators(derive_seed(index.seed, index.position))
        return self.dataset[index.indices]

    def __getitems__(self, indices: Any) -> list[Any]:
        seeded = isinstance(indices, SeededIndices)
        plain = indices.indices if seeded else indices
        if not seeded or _fetches_batches(self.dataset):
            if seeded:
                seed_generators(derive_seed(indices.seed, indices.position))
            fetch = getattr(self.dataset, "__getitems__", None)
            return fetch(plain) if callable(fetch) else [self.dataset[index] for index in plain]
        samples = []
        for offset, index in enumerate(plain):
            seed_generators(derive_seed(indices.seed, indices.position + offset))
            samples.append(self.dataset[index])
        return samples

    def __len__(self) -> int:
        return len(self.dataset)


class WorkerStart:
    """Calls the user's `worker_init_fn` with the user's dataset in `get_worker_info()`, not our wrapper of it."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        # WorkerInfo refuses plain assignment; the loop that serves batches has its own reference to the wrapper.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
