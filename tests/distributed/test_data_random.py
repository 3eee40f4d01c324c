# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Augmentation in workers is that of the sample, not of who reads it when (invariants 2 and 5)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from data_loading import Augmented, Stream, draw, prepare, read
from torch.utils.data import DataLoader, Subset, get_worker_info

from accelerate_lshdp.data.random_numbers import RandomSequence, derive_seed, seed_generators


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


def rows(loaders: list) -> dict[float, list[float]]:
    return {
        row[0]: row for loader in loaders for batch, place in read(loader) if place.samples for row in batch.tolist()
    }


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(30))], ids=["plain", "subset"])
def test_every_plan_and_number_of_workers_sees_the_same_augmentation(wrap):
    def loaders(sizes: list, workers: int) -> list:
        return prepare(lambda: DataLoader(wrap(Augmented(30)), batch_size=4, shuffle=True, num_workers=workers), sizes)

    reference = loaders([6], 1)
    first, second = rows(reference), rows(reference)
    assert len({tuple(row[1:]) for row in [*first.values(), *second.values()]}) == 60, "drawn anew in each epoch"
    assert rows(loaders([(1, 2), (2, 2)], 2)) == first
    assert rows(loaders([3, 2, 1], 1)) == first


def test_a_dataset_that_fetches_batches_is_seeded_for_each_micro_batch():
    class Batched(Augmented):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            drawn = draw()
            return [torch.tensor([float(index), *drawn]) for index in indices]

    def first_rows() -> dict[float, list[float]]:
        return rows(prepare(lambda: DataLoader(Batched(30), batch_size=4, num_workers=2), [(3, 2), 4]))

    once = first_rows()
    assert first_rows() == once and len(once) == 30
    assert once[0.0][1:] == once[2.0][1:] != once[3.0][1:]


def test_streams_are_augmented_the_same_on_every_plan():
    def loaders(sizes: list) -> list:
        return prepare(lambda: DataLoader(Stream(30, augmented=True), batch_size=4, num_workers=2), sizes)

    assert rows(loaders([(1, 2), (2, 2)])) == rows(loaders([6]))


def remember_dataset(worker: int) -> None:
    get_worker_info().dataset.started_by = worker


class Told(Augmented):
    started_by = -1.0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.started_by])


class ToldStream(Stream):
    started_by = -1.0

    def __iter__(self):
        for sample in super().__iter__():
            yield torch.tensor([float(sample), self.started_by])


@pytest.mark.parametrize("dataset", [Told(12), ToldStream(12)], ids=["map", "stream"])
def test_worker_init_fn_is_given_the_users_dataset(dataset):
    (loader,) = prepare(lambda: DataLoader(dataset, batch_size=4, num_workers=2, worker_init_fn=remember_dataset), [4])
    assert {row[1] for row in rows([loader]).values()} == {0.0, 1.0}


def test_a_sequence_goes_on_where_it_was_and_leaves_the_outer_generators_alone():
    def state() -> tuple:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    sequence = RandomSequence(9)
    before = state()
    with sequence.drawing():
        first = draw()
    assert state() == before
    draw()
    with sequence.drawing():
        second = draw()
    seed_generators(9)
    assert first + second == draw() + draw()


def test_derived_seeds_depend_on_every_part():
    seeds = {derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), ("1", 2), (1, 2, 0)]}
    assert len(seeds) == 5 and all(0 <= seed < 2**62 for seed in seeds)
