# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Sizes that change within a pass: all ranks change at one global batch, and no global batch changes (invariant 2)."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from data_loading import Augmented, Stream, by_global_batch, prepare, rank_batches, read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from accelerate_lshdp.data.cut import GlobalBatchCut, largest_remainder
from accelerate_lshdp.data.prepare import HeterogeneousDataLoader, MicroBatchPlace, skip_first_batches
from accelerate_lshdp.data.size_switch import CutSchedule


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


# The schedule


@given(
    start=st.integers(0, 3),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 9)), max_size=20),
)
def test_a_schedule_is_a_table_whose_rows_are_fixed_once_they_are_cut(start: int, actions: list):
    table = [GlobalBatchCut((5, 5), (1, 1))] * 20
    schedule = CutSchedule(table[0], start)
    cut_so_far = start - 1
    for is_switch, offset, size in actions:
        index = start + offset
        if not is_switch:
            cut_so_far = max(cut_so_far, index)
            assert schedule.at(index) == table[index]
        elif index <= cut_so_far:
            with pytest.raises(RuntimeError, match=f"global batch {index}, but this rank has cut all up to"):
                schedule.switch(index, GlobalBatchCut((size, 10 - size), (1, 1)))
        else:
            table[index:] = [GlobalBatchCut((size, 10 - size), (1, 1))] * len(table[index:])
            schedule.switch(index, table[index])
        assert schedule.furthest == cut_so_far
    assert [schedule.at(index) for index in range(start, 20)] == table[start:]


@given(first=st.integers(0, 5), ahead=st.integers(0, 6), begins=st.integers(0, 9), start=st.integers(0, 3))
def test_a_pass_that_follows_another_has_its_sizes(first: int, ahead: int, begins: int, start: int):
    """Also where they change only after the second pass began."""
    cuts = [GlobalBatchCut(sizes, (1, 1)) for sizes in ((5, 5), (7, 3), (2, 8))]
    leader = CutSchedule(cuts[0])
    leader.switch(first, cuts[1])
    leader.switch(first + ahead, cuts[2])
    follower = CutSchedule(cuts[2], start)
    follower.follow(leader, begins)
    assert [follower.at(start + i) for i in range(20)] == [leader.at(begins + i) for i in range(20)]


# All ranks in step


class ReadsAhead:
    """A DataLoader's workers without processes: `depth` index lists are taken before the first is needed."""

    def __init__(self, loader: DataLoader, depth: int) -> None:
        self.loader = loader
        self.depth = depth

    def __iter__(self) -> Iterator[Any]:
        index_lists = iter(self.loader.batch_sampler)
        taken: deque[list[int]] = deque()

        def batches() -> Iterator[Any]:
            while True:
                while len(taken) <= self.depth and (indices := next(index_lists, None)) is not None:
                    taken.append(indices)
                if not taken:
                    return
                yield default_collate([self.loader.dataset[index] for index in taken.popleft()])

        return batches()


@dataclass
class Run:
    passes: list[list[tuple[torch.Tensor, MicroBatchPlace]]]
    """Of each rank."""
    cuts: dict[int, GlobalBatchCut]
    """What each global batch from the first switch on should have been cut with."""


def train(loaders: Sequence[HeterogeneousDataLoader], switches: dict[int, Sequence], stop: int | None = None) -> Run:
    """One pass of all ranks, which agree on the sizes `switches[t]` when they have trained on global batch t.

    They stop after global batch `stop`; the state of each loader there is left in `loader.state`.
    """
    iterators = [iter(loader) for loader in loaders]
    run = Run([[] for _ in loaders], {})
    while True:
        trained = set()
        for loader, batches, pairs in zip(loaders, iterators, run.passes, strict=True):
            place = None
            while (place is None or not place.ends_global_batch) and (batch := next(batches, None)) is not None:
                place = loader._context.places[-1]
                pairs.append((batch, place))
            trained.add(None if place is None else place.global_batch)
        (index,) = trained
        if index is None:
            return run
        if index in switches:
            sizes = rank_batches(switches[index])
            running = [loader._context.running for loader in loaders]
            ahead = max(loader.read_ahead for loader in running)
            (first,) = {loader.switch_sizes(sizes, ahead) for loader in running}
            assert first == index + 1 + ahead
            for later in range(first, 100):
                run.cuts[later] = GlobalBatchCut.from_plan(sizes)
        if index == stop:
            for loader in loaders:
                loader.state = json.loads(json.dumps(loader.state_dict()))
            return run


def check_same_data(run: Run, plain: Run) -> None:
    """The global batches are those of `plain`, which switched nothing, and are cut as was agreed."""
    assert by_global_batch(run.passes) == by_global_batch(plain.passes)
    for rank, (pairs, others) in enumerate(zip(run.passes, plain.passes, strict=True)):
        shares: dict[int, int] = {}
        for (batch, place), (_, other) in zip(pairs, others, strict=True):
            assert place.cut == run.cuts.get(place.global_batch, other.cut)
            assert len(batch) == max(1, place.samples)
            shares[place.global_batch] = shares.get(place.global_batch, 0) + place.samples
            same = {"samples": other.samples, "tokens": other.tokens, "window_tokens": other.window_tokens}
            assert replace(place, cut=other.cut, **same) == other, "only the shares change"
        for _, place in pairs:
            expected = largest_remainder(place.total_samples, place.cut.sizes)
            assert shares[place.global_batch] == expected[rank], "a short one is cut in proportion to the sizes"


def count_tokens(batch: torch.Tensor) -> int:
    return int((batch + 1).sum())


def check_tokens(run: Run) -> None:
    for pairs in run.passes:
        windows: list[list[MicroBatchPlace]] = []
        for batch, place in pairs:
            if place.window_start or not windows:
                windows.append([])
            windows[-1].append(place)
            assert place.tokens == (count_tokens(batch) if place.samples else 0)
        for window in windows:
            assert {place.window_tokens for place in window} == {sum(place.tokens for place in window)}


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    world_size, steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    total = draw(st.integers(world_size, 8))

    def sizes() -> list[tuple[int, int]]:
        inner = st.lists(st.integers(1, total - 1), min_size=world_size - 1, max_size=world_size - 1, unique=True)
        bounds = [0, *sorted(draw(inner) if world_size > 1 else []), total]
        return [(end - start, steps) for start, end in zip(bounds, bounds[1:], strict=False)]

    return {
        "sizes": sizes(),
        "depths": [draw(st.integers(0, 7)) for _ in range(world_size)],
        "switches": {after: sizes() for after in draw(st.sets(st.integers(0, 9), max_size=5))},
    }


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    run=runs(),
    length=st.integers(0, 70),
    stream=st.booleans(),
    drop_last=st.booleans(),
    skip=st.integers(0, 2),
    g=st.integers(1, 3),
    sync=st.booleans(),
    tokens=st.booleans(),
)
def test_no_sequence_of_switches_changes_a_global_batch(
    run: dict, length: int, stream: bool, drop_last: bool, skip: int, g: int, sync: bool, tokens: bool
):
    steps, total = run["sizes"][0][1], sum(size * steps for size, steps in run["sizes"])
    skip = min(skip, length // total)

    def two_passes(switches: dict) -> list[Run]:
        sampler = {} if stream or not length else {"shuffle": True}
        data = Stream(length) if stream else range(length)
        context = {"g": g, "sync_with_dataloader": sync, "token_counter": count_tokens if tokens else None}
        loaders = prepare(
            lambda: DataLoader(data, batch_size=4, drop_last=drop_last, **sampler), run["sizes"], context=context
        )
        for loader, depth in zip(loaders, run["depths"], strict=True):
            if not stream:
                loader._source.base_dataloader = ReadsAhead(loader.base_dataloader, depth)
        return [
            train([skip_first_batches(loader, skip * steps) for loader in loaders], switches),
            train(loaders, {after + 1: sizes for after, sizes in switches.items()}),
        ]

    whole = (length // total if drop_last else -(-length // total)) * total
    for switched, plain, skipped in zip(two_passes(run["switches"]), two_passes({}), (skip, 0), strict=True):
        check_same_data(switched, plain)
        if tokens:
            check_tokens(switched)
        seen = sum(by_global_batch(switched.passes), [])
        assert len(seen) == len(set(seen)) == max(0, min(length, whole) - skipped * total)


UNEQUAL_STEPS = [[(3, 2), (2, 2), 2], [(1, 2), (4, 2), 2], [(4, 2), (1, 2), 2], [(2, 2), (1, 2), 6]]
"""12 samples in 2 + 2 + 1 micro-batches."""


@pytest.mark.parametrize("counter", [None, count_tokens], ids=["plain", "tokens"])
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_switch_together_however_far_their_workers_are_ahead(persistent: bool, counter: Any):
    def loaders() -> list[HeterogeneousDataLoader]:
        options = iter(
            [
                {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent},
                {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": persistent},
                {},
            ]
        )
        return prepare(
            lambda: DataLoader(range(293), batch_size=4, shuffle=True, **next(options)),
            UNEQUAL_STEPS[0],
            context={"g": 2, "token_counter": counter},
        )

    first, second, third = UNEQUAL_STEPS[1:]
    switched, plain = loaders(), loaders()
    run = train(switched, {0: first, 2: second, 8: third, 14: first, 23: second})
    assert len({place.cut for _, place in run.passes[0]}) == 4, "all sizes had their turn"
    check_same_data(run, train(plain, {}))
    # A new pass takes the sizes of the plan, which is another one by now.
    for loader in switched:
        loader._context.rank_batches = rank_batches(second)
    again = train(switched, {2: first})
    again.cuts = {index: again.cuts.get(index, GlobalBatchCut.from_plan(rank_batches(second))) for index in range(30)}
    assert len(set(again.cuts.values())) == 2
    check_same_data(again, train(plain, {}))


@pytest.mark.parametrize(
    ("data", "workers"), [(Augmented(61), 1), (Stream(61, augmented=True), 0)], ids=["map", "stream"]
)
def test_random_augmentation_is_the_same_with_switches(data: Any, workers: int):
    def rows(switches: dict) -> list[list]:
        loaders = prepare(lambda: DataLoader(data, batch_size=4, num_workers=workers), [3, 3])
        return by_global_batch(train(loaders, switches).passes)

    assert rows({1: [5, 1], 4: [2, 4]}) == rows({})


# When sizes can be switched, and when not


def test_read_ahead_counts_what_is_cut_beyond_the_last_batch():
    (plain,) = prepare(lambda: DataLoader(range(40), batch_size=4), [(2, 2)])
    (stream,) = prepare(lambda: DataLoader(Stream(40), batch_size=4), [(2, 2)])
    workers = {"num_workers": 2, "prefetch_factor": 3}  # 6 lists, 3 global batches, and one list for each that is read
    (prefetching,) = prepare(lambda: DataLoader(range(40), batch_size=4, **workers), [(2, 2)])
    (counting,) = prepare(
        lambda: DataLoader(range(40), batch_size=4), [(2, 2)], context={"g": 2, "token_counter": len}
    )
    late = skip_first_batches(counting, 4)
    before_first = []
    counting._context.token_counter = lambda batch: before_first.append(late.read_ahead) or len(batch)

    def ahead(loader: HeterogeneousDataLoader) -> list[int]:
        return [loader.read_ahead for _ in loader]

    assert ahead(plain) == [0] * 20
    assert ahead(stream) == [1] * 18 + [0] * 2, "one bundle, until there is none"
    assert ahead(prefetching) == [3] * 14 + [2] * 2 + [1] * 2 + [0] * 2
    assert ahead(late) == [1, 1, 0, 0] * 4, "a step is complete before its first batch is trained on"
    assert before_first[0] == 2, "of the first step that is not skipped"


def test_switch_that_comes_too_late_is_an_error_and_changes_nothing():
    (loader,) = prepare(
        lambda: DataLoader(range(24), batch_size=4), [(2, 2), 2], context={"token_counter": len, "g": 2}
    )[:1]
    other = rank_batches([(1, 2), 4])
    sizes = []
    for index, batch in enumerate(loader):
        sizes.append(len(batch))
        if index == 3:
            ahead = loader.read_ahead  # 0: a step ends here, so this is no longer true when a batch is fetched
        if index == 4:
            with pytest.raises(RuntimeError, match="at global batch 3, but this rank has cut all up to 3, expected"):
                loader.switch_sizes(other, ahead)
            with pytest.raises(RuntimeError, match="at global batch 2"):
                loader.switch_sizes(other, -1)
    assert sizes == [2] * 8


@pytest.mark.parametrize(
    "sizes",
    [[(2, 2), 3], [(1, 4), 2], [(2, 1), 4], [(2, 2), 1, 1], [6]],
    ids=["total", "more steps", "fewer steps", "more ranks", "fewer ranks"],
)
def test_sizes_that_would_change_global_batches_or_steps_are_refused(sizes: list):
    loaders = prepare(lambda: DataLoader(range(24), batch_size=4), [(2, 2), 2])
    batches = iter(loaders[0])
    next(batches)
    with pytest.raises(ValueError, match=r"expected 6 in \(2, 1\)"):
        loaders[0].switch_sizes(rank_batches(sizes), 0)


def test_sizes_are_switched_in_training_passes_only():
    (loader, _) = prepare(lambda: DataLoader(range(24), batch_size=4), [4, 2])
    new = rank_batches([1, 5])

    def cannot(loader: HeterogeneousDataLoader) -> bool:
        return not loader.can_switch and loader.read_ahead == 0 and loader.switch_sizes(new, 0) is None

    assert cannot(loader)
    loader._context.evaluating = True
    assert all(cannot(loader) for _ in loader)
    loader._context.evaluating = False
    for _ in loader:
        loader._context.evaluating = True
        assert all(loader.can_switch for _ in loader), "the training pass around an evaluation goes on"
        loader._context.evaluating = False
        assert loader.switch_sizes(new, 0) == 1
        break
    assert cannot(loader)
    assert {place.cut.sizes for _, place in read(loader)} == {(4, 2)}, "what was to come is forgotten with its pass"


def test_a_pass_that_skips_is_switched_where_it_runs():
    loaders = prepare(lambda: DataLoader(range(24), batch_size=4), [4, 2])
    views = [skip_first_batches(loader, 1) for loader in loaders]
    run = train(views, {1: [1, 5]})
    assert [[place.cut.sizes for _, place in pairs] for pairs in run.passes] == [[(4, 2), (1, 5), (1, 5)]] * 2
    assert sum(by_global_batch(run.passes), []) == list(range(6, 24))


@pytest.mark.parametrize("persistent", [False, True])
def test_stream_with_workers_takes_new_sizes_at_the_next_pass(persistent: bool):
    loaders = prepare(
        lambda: DataLoader(Stream(24), batch_size=4, num_workers=1, persistent_workers=persistent), [4, 2]
    )
    passes = []
    for sizes in ([4, 2], [1, 5], [1, 5]):
        new = rank_batches(sizes)
        for loader in loaders:
            loader._context.rank_batches = new
        batches = [iter(loader) for loader in loaders]
        first = [next(iterator) for iterator in batches]
        assert [len(batch) for batch in first] == sizes
        for loader in loaders:
            assert not loader.can_switch and loader.read_ahead == 0
            assert loader.switch_sizes(rank_batches([3, 3]), 2) is None
        passes.append([torch.cat([one, *rest]).tolist() for one, rest in zip(first, batches, strict=True)])
    assert [[len(samples) for samples in ranks] for ranks in passes] == [[16, 8], [4, 20], [4, 20]]
    assert all(sorted(sum(ranks, [])) == list(range(24)) for ranks in passes)


# Resuming


@pytest.mark.parametrize(
    ("data", "options"),
    [(range(61), {"num_workers": 1}), (range(61), {}), (Stream(61), {})],
    ids=["loader process", "map", "stream"],
)
def test_a_pass_resumes_after_a_switch_under_any_sizes(data: Any, options: dict):
    def loaders(sizes: list) -> list[HeterogeneousDataLoader]:
        return prepare(lambda: DataLoader(data, batch_size=4, **options), sizes)

    straight = loaders([(2, 2), 2])
    whole = train(straight, {}, stop=6)
    stopped = loaders([(2, 2), 2])
    # The second switch is still to come where the run stops, and may be lost: the next pass takes the plan's sizes.
    before = train(stopped, {0: [(1, 2), 4], 5: [(2, 2), 2]}, stop=6)
    check_same_data(before, whole)
    states = [loader.state for loader in (*straight, *stopped)]
    assert all(state == states[0] for state in states), "a position does not depend on the sizes"
    seen = sum(by_global_batch(before.passes), [])
    for sizes in ([(1, 2), 4], [(2, 2), 2], [2, 1, 1, 2]):
        resumed = loaders(sizes)
        for loader in resumed:
            loader.load_state_dict(states[0])
            loader.resume()
        rest = train(resumed, {8: list(reversed(sizes))} if len(sizes) == 4 else {})
        assert {place.global_batch for _, place in rest.passes[0]} == {7, 8, 9, 10}
        assert seen + sum(by_global_batch(rest.passes), []) == list(range(61))
