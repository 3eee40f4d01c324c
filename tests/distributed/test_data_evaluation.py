# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Evaluation passes are those of stock accelerate, the plan notwithstanding."""

from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState, PartialState
from data_loading import SizedStream, Stream, prepare, read
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate_lshdp.data.prepare import skip_first_batches


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


SIZES = {1: [5], 2: [3, 1], 3: [(1, 2), 4, 2]}


def stock(loader: DataLoader, rank: int, world_size: int, **options: object) -> DataLoader:
    return prepare_data_loader(
        loader, num_processes=world_size, process_index=rank, use_seedable_sampler=True, data_seed=7, **options
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 4, "drop_last": True},
        {"batch_sampler": BatchSampler(SequentialSampler(range(23)), 5, False)},
        {"batch_size": 4, "num_workers": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_map_style_batches_are_those_of_stock(world_size: int, even_batches: bool, options: dict):
    loaders = prepare(
        lambda: DataLoader(range(23), **options), SIZES[world_size], evaluating=True, even_batches=even_batches
    )
    for rank, loader in enumerate(loaders):
        expected = stock(DataLoader(range(23), **options), rank, world_size, even_batches=even_batches)
        assert len(loader) == len(expected)
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected]
        assert loader._context.places == []
        assert loader._context.events == ["begin evaluation", "end"] * 2


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_cutting_the_last_gathered_batch_to_its_remainder_gives_each_sample_once(stream: bool, split_batches: bool):
    data = SizedStream(23) if stream else range(23)
    loaders = prepare(lambda: DataLoader(data, batch_size=4), [3, 1], evaluating=True, split_batches=split_batches)
    assert loaders[0].total_batch_size == (4 if split_batches else 8)
    # What gather_for_metrics does, with GradientState's view of one rank; each rank is read alone here.
    passes = []
    for loader in loaders:
        batches = []
        for batch in loader:
            state = GradientState()
            batches.append((batch, state.end_of_dataloader, state.remainder))
        passes.append(batches)
    gathered: list[int] = []
    for parts in zip(*passes, strict=True):
        whole = torch.cat([batch for batch, _, _ in parts]).tolist()
        ended, remainder = parts[0][1:]
        gathered.extend(whole[:remainder] if ended and remainder > 0 else whole)
    assert gathered == list(range(23))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stream_batches_are_those_of_stock(world_size: int):
    loaders = prepare(lambda: DataLoader(Stream(23), batch_size=4), SIZES[world_size], evaluating=True)
    for rank, loader in enumerate(loaders):
        expected = stock(DataLoader(Stream(23), batch_size=4), rank, world_size)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected]


def test_skipping_in_an_evaluation_pass_counts_its_own_batches():
    (loader, _) = prepare(lambda: DataLoader(range(23), batch_size=4), [(1, 3), 1], evaluating=True)
    skipping = skip_first_batches(loader, 2)
    assert len(skipping) == len(loader) - 2 == 1
    assert [batch.tolist() for batch in skipping] == [batch.tolist() for batch in loader][2:]


def test_one_loader_serves_both_kinds_of_pass_and_len_follows():
    (loader, _) = prepare(lambda: DataLoader(range(23), batch_size=4, shuffle=True, num_workers=1), [3, 1])
    first_epoch = [batch.tolist() for batch, _ in read(loader)]
    loader.set_epoch(0)
    for _ in range(2):
        loader._context.evaluating = True
        assert len(loader) == len(list(loader)) == 3 and loader.total_batch_size == 8
    loader._context.evaluating = False
    assert len(loader) == 6 and loader.total_batch_size == 4
    assert [batch.tolist() for batch, _ in read(loader)] == first_epoch, "evaluation passes count no training epochs"
