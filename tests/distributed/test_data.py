# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Same data whatever the plan (invariant 2): map-style loaders, read by all ranks without processes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from accelerate.data_loader import skip_first_batches as stock_skip_first_batches
from accelerate.state import GradientState, PartialState
from data_loading import Disagreement, by_global_batch, prepare, read, real
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from accelerate_lshdp.data.prepare import HeterogeneousDataLoader, prepare_loader


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


rank_sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(0, 60),
    sizes=rank_sizes,
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    g=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_ranks_together_read_each_global_batch_once(
    length: int, sizes: list[tuple[int, int]], shuffle: bool, drop_last: bool, g: int, seed: int
):
    total = sum(size * steps for size, steps in sizes)
    sampler = {"shuffle": True} if shuffle and length else {}
    loaders = prepare(
        lambda: DataLoader(range(length), batch_size=4, drop_last=drop_last, **sampler),
        sizes,
        context={"g": g, "seed": seed},
    )
    # The order does not come from the loader under test: torch's own permutation of seed + epoch.
    order = list(range(length))
    if sampler:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    expected = [order[i : i + total] for i in range(0, length, total)]
    if drop_last and expected and len(expected[-1]) < total:
        expected.pop()
    lengths = [len(loader) for loader in loaders]
    passes = [read(loader) for loader in loaders]
    assert by_global_batch(passes) == expected
    for loader, pairs, announced, (size, steps) in zip(loaders, passes, lengths, sizes, strict=True):
        places = [place for _, place in pairs]
        assert len(pairs) == announced == len(expected) * steps
        assert [place.micro_batch for place in places] == list(range(steps)) * len(expected)
        assert [place.last_in_pass for place in places] == [False] * (len(places) - 1) + [True] * bool(places)
        for index, (batch, place) in enumerate(pairs):
            window, step = divmod(place.global_batch, g)
            assert place.total_samples == len(expected[place.global_batch])
            assert place.first_sample == place.global_batch * total
            assert len(batch) == max(1, place.samples) <= size
            assert set(batch.tolist()) <= set(expected[place.global_batch]), "a repeated sample is of its global batch"
            assert place.window_start == (step == 0 and place.micro_batch == 0)
            ends = step == g - 1 or place.global_batch == len(expected) - 1
            assert place.window_end == (ends and place.micro_batch == steps - 1)
            assert place.epoch == 0 and index == place.global_batch * steps + place.micro_batch
        assert loader.position.epoch == 1 and loader.position.samples == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sizes", [[16], [8, 8], [11, 5], [(2, 4), (4, 2)], [1, 2, 3, 10], [(3, 1), 4, 4, 3, 2]])
def test_two_epochs_are_the_same_for_every_plan_of_equal_total(sizes: list, workers: int):
    loaders = prepare(lambda: DataLoader(range(37), batch_size=8, shuffle=True, num_workers=workers), sizes)
    reference = prepare(lambda: DataLoader(range(37), batch_size=16, shuffle=True), None, world_size=1)
    for epoch in range(2):
        whole = by_global_batch([read(reference[0])])
        assert by_global_batch([read(loader) for loader in loaders]) == whole
        assert sorted(sum(whole, [])) == list(range(37))
        assert sum(whole, []) == torch.randperm(37, generator=torch.Generator().manual_seed(7 + epoch)).tolist()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "prefetch_factor": 5},
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 2, "persistent_workers": True, "pin_memory": True},
    ],
    ids=str,
)
def test_places_line_up_with_batches_however_far_workers_are_ahead(options: dict):
    plain = prepare(lambda: DataLoader(range(29), batch_size=4, shuffle=True), [(3, 2), 2])
    ahead = prepare(lambda: DataLoader(range(29), batch_size=4, shuffle=True, **options), [(3, 2), 2])
    for _ in range(3):
        for one, other in zip(plain, ahead, strict=True):
            expected = [(batch.tolist(), place) for batch, place in read(one)]
            assert [(batch.tolist(), place) for batch, place in read(other)] == expected


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_one_sample_is_enough_for_any_world(world_size: int):
    loaders = prepare(lambda: DataLoader(range(1), batch_size=2), [2] * world_size)
    passes = [read(loader) for loader in loaders]
    assert [place.samples for ((_, place),) in passes] == [1] + [0] * (world_size - 1)
    assert all(batch.tolist() == [0] for ((batch, _),) in passes)


def test_equal_plan_uses_the_loaders_own_batch_size():
    loaders = prepare(lambda: DataLoader(range(10), batch_size=3), None, world_size=2)
    assert [real(read(loader)) for loader in loaders] == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]
    split = prepare(lambda: DataLoader(range(10), batch_size=4), None, world_size=2, split_batches=True)
    assert [real(read(loader)) for loader in split] == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
    assert split[0].total_batch_size == 4 and loaders[0].total_batch_size == 6
    (odd, *_) = prepare(lambda: DataLoader(range(10), batch_size=3), None, world_size=2, split_batches=True)
    with pytest.raises(ValueError, match="split_batches=True with a batch_size of 3 on 2 ranks"):
        next(iter(odd))


def test_plan_that_replaces_the_batch_size_is_said_once(caplog: pytest.LogCaptureFixture):
    loaders = prepare(lambda: DataLoader(range(40), batch_size=19), [13, 6])
    for _ in range(2):
        read(loaders[0])
    said = [record.message for record in caplog.records if "13 + 6" in record.message]
    assert len(said) == 1 and "batch_size=19" in said[0]


class Uneven:
    """A user's batch sampler: batches of different sizes, reversed in every other epoch."""

    batch_size = 3
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[4, 2], [9, 8, 7], [0], [1, 3, 5, 6]]
        yield from reversed(batches) if self.epoch % 2 else batches

    def __len__(self) -> int:
        return 4


def test_batch_sampler_is_flattened_in_order_and_cut():
    loaders = prepare(lambda: DataLoader(range(10), batch_sampler=Uneven()), [2, 1])
    assert by_global_batch([read(loader) for loader in loaders]) == [[4, 2, 9], [8, 7, 0], [1, 3, 5], [6]]
    second = [read(loader) for loader in loaders]
    assert sum(by_global_batch(second), []) == [1, 3, 5, 6, 0, 9, 8, 7, 4, 2]
    assert len(loaders[0]) == 4
    assert isinstance(loaders[0].batch_sampler.batch_sampler, Uneven)


def test_sampler_that_is_a_batch_sampler_reads_whole_batches():
    class Table(Dataset):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    def make() -> DataLoader:
        return DataLoader(Table(), sampler=BatchSampler(SequentialSampler(range(7)), 2, False), batch_size=None)

    assert by_global_batch([read(loader) for loader in prepare(make, [3, 1])]) == [[0, 1, 2, 3], [4, 5, 6]]


def test_set_epoch_repeats_an_epoch_and_reaches_the_dataset():
    class Data(Dataset):
        epoch = None

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            return index

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    (loader,) = prepare(lambda: DataLoader(Data(), batch_size=4, shuffle=True), [4])
    epochs = [real(read(loader)) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    loader.set_epoch(1)
    assert real(read(loader)) == epochs[1]
    assert loader.dataset.epoch == 1 and loader.iteration == 2


def test_user_generator_gives_the_order_that_torch_gives():
    def make() -> DataLoader:
        return DataLoader(range(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))

    plain = make()
    expected = [[sample for batch in plain for sample in batch.tolist()] for _ in range(3)]
    loaders = prepare(make, [3, 1])
    for epoch in range(3):
        assert sum(by_global_batch([read(loader) for loader in loaders]), []) == expected[epoch]


@pytest.mark.parametrize("shuffle", ["sampler without a seed", "generators that differ"])
def test_ranks_that_would_read_other_samples_are_caught_before_the_first_batch(shuffle: str):
    class Anyhow(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(len(self.data_source)).tolist())

    seeds = iter(range(100))

    def make() -> DataLoader:
        if shuffle == "sampler without a seed":
            return DataLoader(range(30), batch_size=4, sampler=Anyhow(range(30)))
        generator = torch.Generator().manual_seed(next(seeds))
        return DataLoader(range(30), batch_size=4, sampler=RandomSampler(range(30), generator=generator))

    first, second = prepare(make, [3, 1])
    read(first)
    with pytest.raises(Disagreement, match="first global batch"):
        read(second)
    assert second._context.places == []


def test_ranks_that_prepare_unequal_datasets_are_caught():
    lengths = iter([10, 11])
    with pytest.raises(Disagreement, match="the prepared DataLoader and its dataset"):
        prepare(lambda: DataLoader(range(next(lengths)), batch_size=4), [3, 1])


def test_torch_samplers_with_an_empty_generator_are_seeded():
    loaders = prepare(lambda: DataLoader(range(30), batch_size=4, sampler=SubsetRandomSampler(range(5, 25))), [3, 1])
    epochs = [sum(by_global_batch([read(loader) for loader in loaders]), []) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(5, 25)) and epochs[0] != epochs[1]


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_leaves_the_global_generator_alone(workers: int, evaluating: bool):
    (loader,) = prepare(
        lambda: DataLoader(range(9), batch_size=2, shuffle=True, num_workers=workers), [4], evaluating=evaluating
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert sum(len(batch) for batch in loader) == 9
    assert torch.equal(torch.get_rng_state(), before)


class Logged(Dataset):
    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


def test_no_sample_is_read_before_the_batch_before_it_is_trained_on():
    (loader,) = prepare(lambda: DataLoader(Logged(), batch_size=1), [(2, 3)])
    seen = 0
    for batch in loader:
        seen += len(batch)
        assert loader.dataset.fetched == list(range(seen))
    assert seen == 17


def test_tokens_of_a_step_are_known_at_its_first_batch_and_batches_are_told_when_yielded():
    # 17 samples of 1..17 tokens; the last global batch has one sample, which the other three micro-batches repeat.
    def count(batch: torch.Tensor) -> int:
        return int((batch + 1).sum())

    loaders = prepare(
        lambda: DataLoader(Logged(), batch_size=1), [(2, 2), (2, 2)], context={"g": 2, "token_counter": count}
    )
    for loader in loaders:
        context = loader._context
        windows: list[list] = []
        for batch in loader:
            place = context.places[-1]
            if place.window_start:
                windows.append([])
            windows[-1].append((batch, place))
            assert context.events.count("yield") == sum(map(len, windows)), "told at the moment of yielding"
            assert place.tokens == (count(batch) if place.samples else 0)
        for window in windows:
            total = sum(place.tokens for _, place in window)
            assert {place.window_tokens for _, place in window} == {total}
    everything = sum(place.tokens for loader in loaders for place in loader._context.places)
    assert everything == sum(range(1, 18))


def test_a_window_spans_passes_only_without_sync_with_dataloader():
    def windows(sync: bool) -> list[tuple[bool, bool]]:
        context = {"g": 2, "sync_with_dataloader": sync}
        (loader,) = prepare(lambda: DataLoader(range(6), batch_size=2), [2], context=context)
        return [(place.window_start, place.window_end) for _ in range(2) for _, place in read(loader)]

    start, end, both = (True, False), (False, True), (True, True)
    assert windows(True) == [start, end, both] * 2
    assert windows(False) == [start, end, start, end, start, end]


def test_gradient_state_follows_the_pass_and_forgets_one_that_is_left():
    state = GradientState()
    (loader,) = prepare(lambda: DataLoader(range(7), batch_size=2), [(2, 2)])
    ends = []
    for _ in loader:
        assert state.active_dataloader is loader
        ends.append(state.end_of_dataloader)
    assert ends == [False, False, False, True]
    for _ in loader:
        break
    assert not state.in_dataloader
    assert loader._context.events[-3:] == ["begin training", "yield", "end"]
    assert loader.position.epoch == 1 and real(read(loader)) == list(range(7)), "the epoch that was left is read again"


def test_a_pass_that_is_left_does_not_keep_persistent_workers():
    (loader,) = prepare(lambda: DataLoader(range(40), batch_size=2, num_workers=1, persistent_workers=True), [4])
    next(iter(loader))
    base = weakref.ref(loader.base_dataloader)
    gc.disable()
    try:
        del loader
        assert base() is None, "workers in a cycle of garbage take torch seconds to end"
    finally:
        gc.enable()


def test_evaluation_inside_a_training_pass_over_the_same_loader():
    (loader,) = prepare(lambda: DataLoader(range(10), batch_size=3), [4])
    state, seen = GradientState(), []
    for batch in loader:
        seen.extend(batch.tolist())
        loader._context.evaluating = True
        assert [len(inner) for inner in loader] == [3, 3, 3, 1]
        loader._context.evaluating = False
        assert state.active_dataloader is loader
        assert state.end_of_dataloader == (len(seen) == 10)
    assert seen == list(range(10)) and loader.position.epoch == 1


def test_two_training_passes_at_once_are_refused():
    (loader,) = prepare(lambda: DataLoader(range(10), batch_size=3), [4])
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(RuntimeError, match="one at a time"):
        next(first)


@pytest.mark.parametrize(
    ("options", "prepared", "message"),
    [
        ({"batch_size": 2, "num_workers": 1, "in_order": False}, {}, "in_order=False"),
        ({"batch_size": None}, {}, "batch_size=None"),
        ({"batch_size": 2}, {"dispatch_batches": True}, "Set dispatch_batches=False"),
    ],
)
def test_loaders_that_cannot_be_cut_are_refused_with_what_to_do(options: dict, prepared: dict, message: str):
    with pytest.raises(ValueError, match=message):
        prepare(lambda: DataLoader(range(8), **options), [3, 1], **prepared)


def test_batch_sampler_of_unknown_size_needs_a_plan_with_sizes():
    class Sizeless(Uneven):
        batch_size = None

    (loader, _) = prepare(lambda: DataLoader(range(10), batch_sampler=Sizeless()), None, world_size=2)
    with pytest.raises(ValueError, match="integer batch_size"):
        next(iter(loader))
    loaders = prepare(lambda: DataLoader(range(10), batch_sampler=Sizeless()), [3, 1])
    assert sum(by_global_batch([read(loader) for loader in loaders]), []) == [4, 2, 9, 8, 7, 0, 1, 3, 5, 6]


def test_dispatch_without_sizes_is_left_to_stock_accelerate():
    options = {"dispatch_batches": True, "put_on_device": True, "device": torch.device("cpu")}
    (loader,) = prepare(lambda: DataLoader(range(8), batch_size=2), None, world_size=1, **options)
    assert not isinstance(loader, HeterogeneousDataLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_prepared_loader_is_a_dataloader_and_moves_batches():
    (loader,) = prepare(lambda: DataLoader(range(8), batch_size=2), [4])
    assert isinstance(loader, DataLoader) and loader.num_workers == 0
    moved = prepare_loader(DataLoader(range(8), batch_size=2), loader._context, device=torch.device("meta"))
    assert {batch.device.type for batch in moved} == {"meta"}


def test_a_loader_that_stock_accelerate_rebuilds_is_caught():
    (loader, _) = prepare(lambda: DataLoader(range(20), batch_size=2), [3, 1])
    with pytest.raises(RuntimeError, match="LSHDPAccelerator.skip_first_batches"):
        next(iter(stock_skip_first_batches(loader, 1)))
