# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Streams (IterableDataset): every rank reads all of it and keeps its slice, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from data_loading import Disagreement, SizedStream, Stream, by_global_batch, prepare, read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accelerate_lshdp.data.prepare import skip_first_batches
from accelerate_lshdp.data.stream import hash_samples


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(0, 60),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    drop_last=st.booleans(),
    g=st.integers(1, 3),
)
def test_ranks_together_read_each_global_batch_once(
    length: int, sizes: list[tuple[int, int]], drop_last: bool, g: int
):
    total = sum(size * steps for size, steps in sizes)
    loaders = prepare(
        lambda: DataLoader(SizedStream(length), batch_size=4, drop_last=drop_last), sizes, context={"g": g}
    )
    expected = [list(range(length))[i : i + total] for i in range(0, length, total)]
    if drop_last and expected and len(expected[-1]) < total:
        expected.pop()
    lengths = [len(loader) for loader in loaders]
    passes = [read(loader) for loader in loaders]
    assert by_global_batch(passes) == expected
    for pairs, announced, (_, steps) in zip(passes, lengths, sizes, strict=True):
        assert len(pairs) == announced == len(expected) * steps
        assert [place.last_in_pass for _, place in pairs] == [False] * (len(pairs) - 1) + [True] * bool(pairs)
        for _, place in pairs:
            ends = place.global_batch % g == g - 1 or place.global_batch == len(expected) - 1
            assert place.window_end == (ends and place.micro_batch == steps - 1)


@pytest.mark.parametrize(("workers", "persistent"), [(1, True), (2, False), (2, True)])
def test_workers_decide_what_a_global_batch_is_made_of_and_the_plan_does_not(workers: int, persistent: bool):
    def passes(sizes: list) -> list[list[list[int]]]:
        loaders = prepare(
            lambda: DataLoader(Stream(47), batch_size=4, num_workers=workers, persistent_workers=persistent), sizes
        )
        return [by_global_batch([read(loader) for loader in loaders]) for _ in range(2)]

    reference = passes([6])
    assert passes([(1, 2), (2, 2)]) == passes([3, 2, 1]) == reference
    assert sorted(sum(reference[0], [])) == list(range(47))
    for index, batch in enumerate(reference[0][:3]):
        assert {sample % workers for sample in batch} == {index % workers}, "global batch t is worker t % W's"


class Shuffled(IterableDataset):
    """Draws its order from the global generators, or from its own, or from its epoch."""

    def __init__(self, source: str) -> None:
        self.source = source
        if source == "generator":
            self.generator = torch.Generator().manual_seed(5)
        if source == "set_epoch":
            self.epoch = 0
            self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)

    def __iter__(self) -> Iterator[int]:
        if self.source == "numpy":
            return iter(np.random.permutation(30).tolist())
        if self.source == "set_epoch":
            return iter(torch.randperm(30, generator=torch.Generator().manual_seed(self.epoch)).tolist())
        return iter(torch.randperm(30, generator=getattr(self, "generator", None)).tolist())


@pytest.mark.parametrize("source", ["torch", "numpy", "generator", "set_epoch"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_shuffled_streams_are_equal_on_all_ranks_and_change_with_the_epoch(source: str, options: dict):
    loaders = prepare(lambda: DataLoader(Shuffled(source), batch_size=4, **options), [3, 2])
    epochs = []
    for _ in range(2):
        # The main process' own randomness differs between ranks and is left alone.
        passes = []
        for rank, loader in enumerate(loaders):
            torch.manual_seed(rank)
            before = torch.get_rng_state()
            passes.append(read(loader))
            assert torch.equal(torch.get_rng_state(), before)
        epochs.append(sum(by_global_batch(passes), []))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(30)) and epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_read_other_streams_are_caught_before_the_first_batch(workers: int):
    offsets = iter([0, 1])
    first, second = prepare(
        lambda: DataLoader(Stream(30, offset=next(offsets)), batch_size=4, num_workers=workers), [3, 1]
    )
    read(first)
    with pytest.raises(Disagreement, match="first global batch"):
        read(second)
    assert second._context.places == []


def test_an_empty_stream_gives_an_empty_pass():
    loaders = prepare(lambda: DataLoader(Stream(0), batch_size=4), [3, 1])
    assert [read(loader) for loader in loaders] == [[], []]
    assert loaders[1].position.epoch == 1


def test_only_this_ranks_micro_batches_are_collated():
    collated: list[list[int]] = []

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        collated.append([int(sample) for sample in samples])
        return torch.stack(samples)

    _, loader = prepare(lambda: DataLoader(Stream(12), batch_size=4, collate_fn=collate), [4, (1, 2)])
    assert [batch.tolist() for batch, _ in read(loader)] == collated == [[4], [5], [10], [11]]
    collated.clear()
    assert [batch.tolist() for batch, _ in read(skip_first_batches(loader, 2))] == collated == [[10], [11]]


def test_token_windows_of_a_stream():
    loaders = prepare(
        lambda: DataLoader(Stream(17), batch_size=4),
        [(2, 2), 2],
        context={"g": 2, "token_counter": lambda batch: int(batch.sum())},
    )
    passes = [read(loader) for loader in loaders]
    assert sum(place.tokens for pairs in passes for _, place in pairs) == sum(range(17))
    assert [place.window_tokens for _, place in passes[1]] == [4 + 5 + 10 + 11] * 2 + [15 + 16]


def test_datasets_streams_are_not_dealt_out_to_ranks():
    datasets = pytest.importorskip("datasets")

    def make() -> DataLoader:
        table = datasets.Dataset.from_dict({"x": list(range(22))}).to_iterable_dataset(num_shards=4)
        return DataLoader(table.shuffle(seed=3, buffer_size=5).with_format("torch"), batch_size=4)

    loaders = prepare(make, [3, 2])
    epochs = []
    for _ in range(2):
        passes = [[(batch["x"], place) for batch, place in read(loader)] for loader in loaders]
        epochs.append(sum(by_global_batch(passes), []))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(22)) and epochs[0] != epochs[1]


def test_stream_that_makes_batches_itself_is_refused():
    with pytest.raises(ValueError, match="batch_size=None over an IterableDataset"):
        prepare(lambda: DataLoader(Stream(12), batch_size=None), [3, 2])


def test_unknown_length_stays_unknown():
    (loader,) = prepare(lambda: DataLoader(Stream(12), batch_size=4), [3])
    with pytest.raises(TypeError):
        len(loader)


EQUAL = [
    lambda: torch.arange(6.0).reshape(2, 3),
    lambda: torch.ones(3, dtype=torch.bfloat16),
    lambda: torch.tensor(3),
    lambda: torch.arange(6).reshape(2, 3).t(),
    lambda: np.arange(4, dtype=np.int16),
    lambda: np.array(["a", None], dtype=object),
    lambda: {"a": [1, (2.5, None)], "b": "text"},
    lambda: b"bytes",
    lambda: np.float32(2),
    lambda: object(),
]


def test_hashes_tell_samples_apart_and_are_the_same_for_equal_ones():
    hashes = [hash_samples([make()]) for make in EQUAL]
    assert hashes == [hash_samples([make()]) for make in EQUAL]
    others = [torch.arange(6.0), torch.arange(6.0).reshape(3, 2), torch.ones(3), torch.tensor(4), [[1], 2], [1, [2]]]
    hashes += [hash_samples([other]) for other in others]
    assert len(set(hashes)) == len(hashes)
