# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Nothing lost (invariant 5): a pass resumed in mid-epoch reads what is left, under any plan and world size."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from accelerate.state import PartialState
from data_loading import Augmented, Disagreement, SizedStream, Stream, by_global_batch, prepare, read, real
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler

from accelerate_lshdp.data.prepare import HeterogeneousDataLoader, LoaderPosition, skip_first_batches


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


def shuffled(length: int = 41, **options: object) -> Callable[[], DataLoader]:
    return lambda: DataLoader(range(length), batch_size=4, shuffle=True, **options)


def with_user_generator() -> DataLoader:
    return DataLoader(range(41), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(11))


def stop_after(loaders: list[HeterogeneousDataLoader], global_batches: int) -> tuple[list[int], dict]:
    """Read that many global batches on all ranks, and the state that a checkpoint would hold."""
    passes, states = [], []
    for loader in loaders:
        steps = loader._sizes.cut().steps[loader._context.rank]
        pairs = []
        batches = iter(loader)
        for _ in range(global_batches * steps):
            pairs.append((next(batches), loader._context.places[-1]))
        passes.append(pairs)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states), "any rank's state will do for all"
    return sum(by_global_batch(passes), []), states[0]


def restore(loaders: list[HeterogeneousDataLoader], state: dict) -> None:
    for loader in loaders:
        loader.load_state_dict(state)
        loader.resume()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4),
    after=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4),
    data=st.data(),
)
def test_resumed_under_another_plan_the_same_samples_remain(before: list, after: list, data: st.DataObject):
    old, new = prepare(shuffled(), before), prepare(shuffled(), after, context={"seed": 99})
    for loader in old:
        read(loader)
    count = data.draw(st.integers(0, -(-41 // old[0]._sizes.cut().total)))
    seen, state = stop_after(old, count)
    assert old[0].position == LoaderPosition(1, len(seen))
    restore(new, state)
    assert new[0].position == LoaderPosition(1, len(seen))
    passes = [read(loader) for loader in new]
    remaining = sum(by_global_batch(passes), [])
    order = torch.randperm(41, generator=torch.Generator().manual_seed(7 + 1)).tolist()
    assert seen + remaining == order, "seed and epoch are those of the checkpoint, not of the new run"
    for pairs in passes:
        if pairs:
            assert pairs[0][1].first_sample == len(seen) and pairs[0][1].global_batch == count
            assert pairs[0][1].window_start
    following = sum(by_global_batch([read(loader) for loader in new]), [])
    assert following == torch.randperm(41, generator=torch.Generator().manual_seed(7 + 2)).tolist()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("stateful", [False, True])
def test_resumed_under_the_same_plan_batches_and_places_are_the_same(options: dict, stateful: bool):
    sizes = [(2, 2), 3]
    straight = prepare(shuffled(**options), sizes, use_stateful_dataloader=stateful)
    expected = [[(batch.tolist(), place) for batch, place in read(loader)] for loader in straight]
    _, state = stop_after(prepare(shuffled(**options), sizes, use_stateful_dataloader=stateful), 3)
    resumed = prepare(shuffled(**options), sizes, use_stateful_dataloader=stateful)
    restore(resumed, state)
    for loader, whole, steps in zip(resumed, expected, (2, 1), strict=True):
        assert [(batch.tolist(), place) for batch, place in read(loader)] == whole[3 * steps :]
        assert loader.position == LoaderPosition(1, 0)


@pytest.mark.parametrize("epochs", [0, 1])
def test_order_from_a_user_generator_is_restored_for_this_epoch_and_the_next(epochs: int):
    straight, old, new = (prepare(with_user_generator, [3, 2]) for _ in range(3))
    expected = [sum(by_global_batch([read(loader) for loader in straight]), []) for _ in range(epochs + 2)]
    for loader in old:
        for _ in range(epochs):
            read(loader)
    seen, state = stop_after(old, 4)
    restore(new, state)
    assert seen + sum(by_global_batch([read(loader) for loader in new]), []) == expected[epochs]
    assert sum(by_global_batch([read(loader) for loader in new]), []) == expected[epochs + 1]


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("move", ["a number", "set_epoch", "a plain pass"])
def test_after_the_last_batch_a_user_generator_goes_on_behind_its_order(move: str, stateful: bool):
    straight, old = (prepare(with_user_generator, [3, 2], use_stateful_dataloader=stateful) for _ in range(2))
    expected = [sum(by_global_batch([read(loader) for loader in straight]), []) for _ in range(3)]
    _, state = stop_after(old, 9)
    older = {name: value for name, value in state.items() if name != "next_sampler_generator"}
    for saved, first in ((state, 1), (older, 0)):
        new = prepare(with_user_generator, [3, 2], use_stateful_dataloader=stateful)
        for loader in new:
            loader.load_state_dict(saved)
            if move == "set_epoch":
                loader.set_epoch(1)
        passes = [skip_first_batches(loader, 0) if move == "a number" else loader for loader in new]
        for order in expected[first : first + 2]:
            assert sum(by_global_batch([read(loader) for loader in passes]), []) == order
            passes = new


def test_state_between_epochs_resumes_at_the_next_one():
    (loader,) = prepare(shuffled(), [5])
    (straight,) = prepare(shuffled(), [5])
    read(loader)
    state = loader.state_dict()
    (new,) = prepare(shuffled(), [5])
    restore([new], state)
    read(straight)
    assert real(read(new)) == real(read(straight))


def test_a_position_at_the_end_of_an_epoch_gives_an_empty_pass_and_then_the_next_epoch():
    (loader,) = prepare(shuffled(), [5])
    _, state = stop_after([loader], 9)
    (new,) = prepare(shuffled(), [7])
    restore([new], state)
    assert read(new) == []
    assert new.position == LoaderPosition(1, 0) and len(read(new)) == 6


def test_without_resume_the_restored_epoch_starts_again():
    (loader,) = prepare(shuffled(), [5])
    read(loader)
    _, state = stop_after([loader], 2)
    (new,) = prepare(shuffled(), [5])
    new.load_state_dict(state)
    pairs = read(new)
    assert pairs[0][1].epoch == 1 and len(real(pairs)) == 41


def test_skipping_by_number_and_a_plain_pass_after_the_last_batch_mean_the_next_epoch():
    _, state = stop_after(prepare(shuffled(), [5]), 9)
    older = {name: value for name, value in state.items() if name not in ("exhausted", "complete")}
    for saved, number, epoch, samples in [
        (state, 0, 1, 41),
        (state, 2, 1, 31),
        (state, 9, 0, 0),
        (state, None, 1, 41),
        (older, 0, 0, 41),
        (older, None, 0, 41),
    ]:
        (new,) = prepare(shuffled(), [5])
        new.load_state_dict(saved)
        pairs = read(new if number is None else skip_first_batches(new, number))
        assert len(real(pairs)) == samples and {place.epoch for _, place in pairs} <= {epoch}
        assert new.position == LoaderPosition(epoch + 1, 0)
    new.load_state_dict(state)
    new.set_epoch(0)
    assert read(skip_first_batches(new, 0))[0][1].epoch == 0, "the script has asked for it"


def test_a_restored_position_goes_on_with_no_open_step():
    (loader,) = prepare(shuffled(), [5], context={"g": 2, "sync_with_dataloader": False})
    state = loader.state_dict()
    assert not read(loader, 3)[-1][1].window_end
    loader.load_state_dict(state)
    assert [place.window_end for _, place in read(loader, 3)] == [False, True, False]


def test_set_epoch_keeps_a_restored_position_in_that_epoch_and_gives_up_another(caplog: pytest.LogCaptureFixture):
    (loader,) = prepare(shuffled(), [5])
    _, state = stop_after([loader], 2)
    (kept,), (given_up,) = prepare(shuffled(), [5]), prepare(shuffled(), [5])
    restore([kept, given_up], state)
    kept.set_epoch(0)
    assert len(real(read(kept))) == 31 and not caplog.records
    given_up.set_epoch(3)
    assert "gives up the restored position" in caplog.text
    assert len(real(read(given_up))) == 41


def test_skip_first_batches_counts_micro_batches_of_this_rank():
    loaders = prepare(shuffled(), [(2, 3), (1, 2)])
    whole = [[(batch.tolist(), place) for batch, place in read(loader)] for loader in loaders]
    for loader, expected, count in zip(loaders, whole, (6, 4), strict=True):
        loader.set_epoch(0)
        skipping = skip_first_batches(loader, count)
        assert len(skipping) == len(expected) - count and skipping.total_batch_size == 8
        assert [(batch.tolist(), place) for batch, place in read(skipping)] == expected[count:]
        assert loader.position == LoaderPosition(1, 0), "the pass counts as the loader's own"
        assert len(loader) == len(expected)


def test_skipping_into_a_global_batch_names_the_nearest_boundaries():
    (loader,) = prepare(shuffled(), [(2, 3)])
    with pytest.raises(ValueError, match="multiple of 3: 3 or 6"):
        read(skip_first_batches(loader, 4))


def test_ranks_that_skip_different_amounts_are_caught():
    first, second = prepare(shuffled(), [2, 2])
    read(skip_first_batches(first, 1))
    with pytest.raises(Disagreement, match="that skip_first_batches skips"):
        read(skip_first_batches(second, 2))


def test_skipping_to_the_restored_position_and_explicit_skips_win():
    (loader,) = prepare(shuffled(), [5])
    _, state = stop_after([loader], 2)
    (new,) = prepare(shuffled(), [4])
    restore([new], state)
    resumed = skip_first_batches(new, None)
    assert len(resumed) == 8
    assert len(real(read(resumed))) == 31
    restore([new], state)
    assert len(real(read(skip_first_batches(new, 1)))) == 37
    assert len(real(read(new))) == 41, "the restored position is used up"
    with pytest.raises(ValueError, match="no restored position"):
        skip_first_batches(new, None)
    with pytest.raises(ValueError, match="no restored position"):
        new.resume()


def test_a_number_of_the_run_that_saved_is_the_restored_position():
    """Scripts count their own batches, and another plan may make more or fewer of a global batch."""
    loaders = prepare(shuffled(), [(2, 2), (1, 1)])
    _, state = stop_after(loaders, 3)
    for counted in (6, 3):  # by rank 0 and by rank 1
        new = prepare(shuffled(), [3, 2])
        restore(new, state)
        for loader in new:
            loader.set_epoch(0)
            resumed = skip_first_batches(loader, counted)
            assert len(resumed) == 6
            assert read(resumed)[0][1].first_sample == 15


def test_skips_add_up():
    (loader,) = prepare(lambda: DataLoader(range(20), batch_size=4), [4])
    assert real(read(skip_first_batches(skip_first_batches(loader, 1), 2))) == list(range(12, 20))


def test_a_dataset_that_became_shorter_is_an_error():
    (loader,) = prepare(shuffled(), [5])
    _, state = stop_after([loader], 8)
    (new,) = prepare(lambda: DataLoader(range(30), batch_size=4), [5])
    state["order"] = None
    restore([new], state)
    with pytest.raises(ValueError, match="found 30 samples in the epoch, expected to skip 40"):
        read(new)


def test_an_order_that_a_restart_does_not_repeat_is_an_error():
    class Anyhow(SequentialSampler):
        def __iter__(self):
            return iter(torch.randperm(len(self.data_source)).tolist())

    def make() -> DataLoader:
        return DataLoader(range(30), batch_size=4, sampler=Anyhow(range(30)))

    _, state = stop_after(prepare(make, [4]), 2)
    resumed = prepare(make, [4])
    restore(resumed, state)
    with pytest.raises(ValueError, match="another order of the samples in epoch 0"):
        read(resumed[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": -1}, "samples=-1"),
        ({"epoch": 1.0}, "epoch=1.0"),
        ({"epoch": True}, "epoch=True"),
        ({"worker_samples": [3, "4"]}, r"worker_samples\[1\]='4'"),
        ({"seed": None}, "without seed"),
        ({"sampler_generator": "00"}, "generator"),
    ],
)
def test_malformed_states_are_refused(change: dict, message: str):
    (loader,) = prepare(shuffled(), [5])
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    state = loader.state_dict()
    del state["global_batches"]
    with pytest.raises(ValueError, match="global_batches"):
        loader.load_state_dict(state)


# Streams


@pytest.mark.parametrize(
    ("workers", "length", "stateful"),
    [
        (0, 40, False),
        (0, 40, True),
        (2, 23, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 23, False), (3, 19, False))),
    ],
)
def test_a_stream_resumes_with_the_worker_whose_turn_it_is(workers: int, length: int, stateful: bool):
    def loaders() -> list[HeterogeneousDataLoader]:
        return prepare(
            lambda: DataLoader(Stream(length, augmented=True), batch_size=4, num_workers=workers),
            [(2, 2), 2],
            use_stateful_dataloader=stateful,
        )

    straight = [[(batch.tolist(), place) for batch, place in read(loader)] for loader in loaders()]
    count = max(place.global_batch for _, place in straight[0]) + 1
    for stop in {1, count - 1} if workers else {1, count - 2, count}:
        old, new = loaders(), loaders()
        for loader, whole, steps in zip(old, straight, (2, 1), strict=True):
            read(loader, stop * steps)
            state = json.loads(json.dumps(loader.state_dict()))
            assert (
                state["samples"] == whole[stop * steps - 1][1].first_sample + whole[stop * steps - 1][1].total_samples
            )
            other = new[loader._context.rank]
            restore([other], state)
            assert [(batch.tolist(), place) for batch, place in read(other)] == whole[stop * steps :]
            assert other.position == LoaderPosition(1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_under_another_plan_and_world_size(workers: int):
    def make() -> DataLoader:
        return DataLoader(Stream(50), batch_size=4, num_workers=workers)

    old, new = prepare(make, [(2, 2), 2]), prepare(make, [3, 1, 1])
    seen, state = [], {}
    for loader in old:
        seen.extend(real(read(loader, 3 * loader._sizes.cut().steps[loader._context.rank])))
        state = loader.state_dict()
    restore(new, state)
    passes = [read(loader) for loader in new]
    assert sorted(seen + sum(by_global_batch(passes), [])) == list(range(50))
    assert passes[0][0][1].first_sample == 18 and passes[0][0][1].global_batch == 3


@pytest.mark.parametrize(("workers", "length"), [(0, 40), (2, 13), pytest.param(3, 19, marks=pytest.mark.slow)])
def test_skipping_in_a_stream_leaves_whole_global_batches_out(workers: int, length: int):
    loaders = prepare(lambda: DataLoader(SizedStream(length), batch_size=4, num_workers=workers), [(2, 2), 2])
    for loader, steps in zip(loaders, (2, 1), strict=True):
        whole = [(batch.tolist(), place) for batch, place in read(loader)]
        batches = len(whole) // steps
        for count in range(batches + 1) if not workers else (1, batches):
            loader.set_epoch(0)
            pairs = read(skip_first_batches(loader, count * steps))
            assert [(batch.tolist(), place) for batch, place in pairs] == whole[count * steps :]


def test_a_stream_needs_the_number_of_workers_that_its_position_was_reached_with():
    (loader,) = prepare(lambda: DataLoader(Stream(50), batch_size=4, num_workers=2), [4])
    read(loader, 3)
    (new,) = prepare(lambda: DataLoader(Stream(50), batch_size=4), [4])
    restore([new], loader.state_dict())
    with pytest.raises(ValueError, match="2 workers had reached, expected 1 workers'"):
        read(new)


@pytest.mark.parametrize("sizes", [([(2, 2), 3], [(2, 2), 3]), ([(2, 2), 3], [(1, 3), 2, 2])], ids=["same", "other"])
def test_augmentation_in_workers_goes_on_as_if_nothing_had_happened(sizes: tuple[list, list]):
    def make() -> DataLoader:
        return DataLoader(Augmented(41), batch_size=4, shuffle=True, num_workers=2)

    straight, old, new = prepare(make, sizes[0]), prepare(make, sizes[0]), prepare(make, sizes[1])
    expected = {
        row[0]: row for loader in straight for batch, place in read(loader) for row in batch.tolist() if place.samples
    }
    seen, state = stop_after(old, 2)
    restore(new, state)
    rest = sum(by_global_batch([read(loader) for loader in new]), [])
    assert len(seen) + len(rest) == 41
    assert {row[0]: row for row in seen + rest} == expected
