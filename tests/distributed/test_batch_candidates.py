# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which batch is trained where no forward tells, because the models are given copies or changed inputs.

Of the batches that the script may mean it is the only one, or one that counts like all of them; else all ranks stop
with the same error.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, repeat

import pytest
import torch
from test_batch_identity import BATCHES, CASE, Numbers, Script, fetched_ahead, plain, plan_of
from torch import nn
from torch.utils.data import DataLoader, Subset
from training_cases import CASES, collate, make_optimizer, relative_error

from accelerate_lshdp import LSHDPAccelerator


def refused(errors: list) -> bool:
    return len({error.message for error in errors}) == 1 and "of which batch the loss is" in errors[0].message


def train(script: Script, batch: dict, accumulate: bool = False) -> None:
    if accumulate:
        script.train_on(batch)
        return
    script.accelerator.backward(CASE.loss(script.model, batch))
    script.optimizer.step()
    script.optimizer.zero_grad()


def copy_of(batch: dict) -> dict:
    return {name: tensor.clone() for name, tensor in batch.items()}


def copies_of(loader: DataLoader) -> Iterator[dict]:
    """Its frame holds the batch that it has read last, not those whose copies it has given away."""
    for batch in loader:
        yield copy_of(batch)


# Batches that are gone, or trained and still held


def fetch_copies_ahead(equal: bool, accumulate: bool, endless: bool) -> None:
    script = Script("ddp", equal=equal)
    loaders = repeat(script.loader) if endless else [script.loader]
    copies = (batch for loader in loaders for batch in copies_of(loader))
    for step, batch in enumerate(fetched_ahead(copies)):
        train(script, batch, accumulate)
        if step == 8:
            break


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_copies_that_are_fetched_ahead_are_not_taken_for_the_batch_behind_them(workers, equal, accumulate, endless):
    assert refused(workers(2).run(fetch_copies_ahead, equal, accumulate, endless, expect_failure=True, nodes=(2,)))


def train_previous_copy_again(accumulate: bool) -> None:
    script = Script("ddp", equal=True)
    previous = None
    for batch in script.loader:
        train(script, copy_of(batch), accumulate)
        if previous is not None:
            train(script, copy_of(previous), accumulate)
        previous = batch


def train_copies_after_their_originals(accumulate: bool) -> None:
    script = Script("ddp", equal=True)
    kept = list(script.loader)
    for batch in kept:
        train(script, batch, accumulate)
    train(script, copy_of(kept[0]), accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("trains", [train_previous_copy_again, train_copies_after_their_originals])
def test_a_trained_batch_that_is_held_may_be_meant_by_a_copy(workers, trains, accumulate):
    """They count differently: the last global batch is divided as 2 and 1 samples, not as 3 and 3."""
    assert refused(workers(2).run(trains, accumulate, expect_failure=True, nodes=(2,)))


# Where all that may be meant counts alike


def together(*batches: dict) -> dict:
    """What the model is given for several batches: other inputs."""
    return {name: torch.cat([batch[name] for batch in batches]).clone() for name in ("pixel_values", "labels")}


def replay(samples: int, equal: bool, accumulate: bool) -> tuple[dict, int]:
    script = Script("ddp", equal=equal)
    loader = script.accelerator.prepare(script.new_loader(range(samples)))
    first = None
    for batch in loader:
        train(script, batch if first is None else together(batch, first), accumulate)
        first = batch if first is None else first
    return script.parameters, script.accelerator.samples_seen


def expected_of(parts: list[list[int]]) -> dict:
    model, data = CASE.model().double(), CASE.dataset(33, torch.float64)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for indices in parts:
        CASE.loss(model, collate([data[index] for index in indices])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_a_batch_that_is_trained_again_with_each_later_one_is_exact_where_both_count_alike(workers, equal, accumulate):
    expected = expected_of([BATCHES[0], *(BATCHES[0] + batch for batch in BATCHES[1:4])])
    for parameters, seen in workers(2).run(replay, 24, equal, accumulate, nodes=(2,)):
        assert relative_error(parameters, expected) <= 1e-12
        assert seen == 24


def test_and_is_refused_where_one_counts_differently(workers):
    assert refused(workers(2).run(replay, 33, True, False, expect_failure=True, nodes=(2,)))


def test_in_one_process_every_loss_counts_as_it_is(workers):
    ((parameters, seen),) = workers(1).run(replay, 33, True, False)
    assert (
        relative_error(parameters, expected_of([BATCHES[0], *(BATCHES[0] + batch for batch in BATCHES[1:])])) <= 1e-12
    )
    assert seen == 33


def train_with_a_cycled_loader() -> tuple[dict, int]:
    """FixMatch: the batches of the smaller loader stay in `cycle`."""
    script = Script("ddp", equal=True)
    labelled = script.accelerator.prepare(script.new_loader(range(12)))
    for one, two in zip(script.loader, cycle(labelled), strict=False):
        if script.accelerator.reduce(torch.tensor(len(one["labels"]))) == 6:
            train(script, together(one, two))
    return script.parameters, labelled.position.epoch


def test_a_cycled_loader_beside_another_with_changed_inputs(workers):
    """But for the last global batch, of which ranks have other shares."""
    expected = expected_of([batch + BATCHES[number % 2] for number, batch in enumerate(BATCHES[:5])])
    for parameters, epoch in workers(2).run(train_with_a_cycled_loader, nodes=(2,)):
        assert relative_error(parameters, expected) <= 1e-12
        assert epoch == 1


# What is looked at, or validated on


def keep_a_batch_of_another_loader(strategy: str, held_out: int, accumulate: bool) -> tuple[dict, int]:
    script = Script(strategy)
    loader = script.accelerator.prepare(script.new_loader(range(held_out)))
    sample = next(iter(loader))
    for batch in script.loader:
        train(script, copy_of(batch), accumulate)
    assert len(sample) and loader.position.samples == 0
    return script.parameters, script.accelerator.samples_seen


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("strategy", "held_out"), [("ddp", 5), ("lsdp", 18)])
def test_a_kept_batch_of_a_loop_that_is_over_is_not_trained_beside_others(workers, strategy, held_out, accumulate):
    for parameters, seen in workers(2).run(keep_a_batch_of_another_loader, strategy, held_out, accumulate, nodes=(2,)):
        assert relative_error(parameters, plain(BATCHES)) <= 1e-12
        assert seen == 33


class Tasks:
    """Two loaders over the same kind of data, and one model."""

    def __init__(self, name: str) -> None:
        self.case = CASES[name]
        self.accelerator = LSHDPAccelerator(plan=plan_of("ddp", (4, 2)))
        model = self.case.model().double()
        data = self.case.dataset(33, torch.float64)
        loaders = [DataLoader(Subset(data, part), batch_size=3, collate_fn=collate) for part in self.parts]
        self.model, self.optimizer, *self.loaders = self.accelerator.prepare(
            model, make_optimizer(model, 1e-2, 0.0), *loaders
        )
        self.model.train()

    parts = (range(18), range(15, 33))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @classmethod
    def expected(cls, name: str, both: bool) -> dict:
        case = CASES[name]
        model, data = case.model().double(), case.dataset(33, torch.float64)
        optimizer = make_optimizer(model, 1e-2, 0.0)
        for step in range(3):
            for part in cls.parts if both else cls.parts[:1]:
                case.loss(model, collate([data[index] for index in part[6 * step : 6 * step + 6]])).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.named_parameters())


def train_two_tasks(name: str) -> tuple[dict, int, list[int]]:
    tasks = Tasks(name)
    for one, two in zip(*tasks.loaders, strict=True):
        tasks.accelerator.backward(tasks.case.loss(tasks.model, one))
        tasks.accelerator.backward(tasks.case.loss(tasks.model, two))
        tasks.step()
    parameters = dict(tasks.model.named_parameters())
    return parameters, tasks.accelerator.samples_seen, [loader.position.epoch for loader in tasks.loaders]


def validate_on_an_open_loop(name: str) -> tuple[dict, int, list[int]]:
    """The held-out loop began in train mode, so it is none of evaluation."""
    tasks = Tasks(name)
    train, held_out = tasks.loaders
    validation = iter(held_out)
    for number, batch in enumerate(train):
        if number % 2 == 0:
            tasks.model.eval()
            with torch.no_grad():
                looked_at = next(validation)
                tasks.case.loss(tasks.model, looked_at)
            tasks.model.train()
        tasks.accelerator.backward(tasks.case.loss(tasks.model, batch))
        tasks.step()
    parameters = dict(tasks.model.named_parameters())
    return parameters, tasks.accelerator.samples_seen, [train.position.epoch, held_out.position.epoch]


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize("trains", [train_two_tasks, validate_on_an_open_loop])
def test_a_batch_that_waits_is_not_taken_into_the_loss_of_another(workers, name, trains):
    both = trains is train_two_tasks
    for parameters, seen, epochs in workers(2).run(trains, name, nodes=(2,)):
        assert relative_error(parameters, Tasks.expected(name, both)) <= 1e-12
        assert (seen, epochs) == ((36, [1, 1]) if both else (18, [1, 0]))


def validate_text_in_train_mode() -> dict:
    script = Script("ddp")
    loaders = [
        script.accelerator.prepare(DataLoader(CASE.dataset(33, torch.float64), batch_size=3, collate_fn=Numbers))
        for _ in range(2)
    ]
    for _ in range(2):
        for batch in loaders[0]:
            script.train_on(batch.tensors())
        with torch.no_grad():
            for batch in loaders[1]:
                CASE.loss(script.model, batch.tensors())
    return script.parameters


def test_batches_without_tensors_of_a_loop_that_is_over_do_not_wait(workers):
    for parameters in workers(2).run(validate_text_in_train_mode, nodes=(2,)):
        assert relative_error(parameters, plain(BATCHES * 2)) <= 1e-12


def look_at_each_sample() -> list[tuple]:
    accelerator = LSHDPAccelerator(plan=plan_of("ddp", None))
    model, loader = accelerator.prepare(nn.Linear(3, 1), DataLoader(torch.ones(4, 3), batch_size=4))
    model.train()
    each = torch.func.vmap(lambda row: model(row[None]))
    shapes = []
    for batch in loader:
        shapes.append(tuple(each(batch).shape))
        with torch.no_grad():
            shapes.append(tuple(each(batch).shape))
    return shapes


def test_tensors_inside_of_vmap_have_no_memory_to_look_at(workers):
    assert set(workers(1).run(look_at_each_sample)[0]) == {(4, 1, 1)}
