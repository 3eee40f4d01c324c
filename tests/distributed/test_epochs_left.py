# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Epochs that are left by ``break``: what the next pass reads, and what a run that resumes there goes on with."""

from __future__ import annotations

import os
from itertools import repeat
from pathlib import Path

import pytest
import torch
from accelerate.utils import set_seed
from exactness import full
from strategy_cells import cells
from test_batch_identity import CASE, SIZES, plan_of
from torch.utils.data import DataLoader
from training_cases import collate, make_optimizer, relative_error

from accelerate_lshdp import LSHDPAccelerator


SAMPLES, TOTAL = 33, 6


class Training:
    """A script that trains on shuffled data and notes the samples that its ranks have trained together."""

    def __init__(self, strategy: str, *, accumulation: int = 1, generator: bool = False) -> None:
        set_seed(5)
        sizes = SIZES.get(int(os.environ["WORLD_SIZE"]), (TOTAL,))
        self.accelerator = LSHDPAccelerator(plan=plan_of(strategy, sizes), gradient_accumulation_steps=accumulation)
        model = CASE.model().double()
        data = [{**sample, "index": torch.tensor(i)} for i, sample in enumerate(CASE.dataset(SAMPLES, torch.float64))]
        shuffling = {"generator": torch.Generator().manual_seed(3)} if generator else {}
        loader = DataLoader(data, batch_size=3, shuffle=True, collate_fn=collate, **shuffling)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, make_optimizer(model, 1e-2, 0.0), loader
        )
        self.model.train()
        self.samples: list[int] = []

    def train_on(self, batch: dict) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(CASE.loss(self.model, batch))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.samples += self.accelerator.gather_for_metrics(batch["index"]).tolist()

    def train(self, batches: DataLoader, steps: int | None = None) -> None:
        for step, batch in enumerate(batches):
            if step == steps:
                break
            self.train_on(batch)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: full(parameter) for name, parameter in self.model.named_parameters()}


def leave_every_epoch(strategy: str, generator: bool) -> list[list[int]]:
    training = Training(strategy, generator=generator)
    epochs = []
    for _ in range(10):
        training.train(training.loader, 2)
        epochs.append(training.samples)
        training.samples = []
    return epochs


@pytest.mark.parametrize("generator", [False, True])
@cells(("ddp", (1, 1)), ("lsdp", (2,)))
def test_each_epoch_that_is_left_is_followed_by_one_with_a_new_order(workers, strategy, nodes, generator):
    for epochs in workers(sum(nodes)).run(leave_every_epoch, strategy, generator, nodes=nodes):
        assert all(len(set(epoch)) == 12 for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 10
        assert len({sample for epoch in epochs for sample in epoch}) > 30


def test_so_it_is_in_one_process(workers):
    (epochs,) = workers(1).run(leave_every_epoch, "lsdp", False)
    assert len({tuple(epoch) for epoch in epochs}) == 10


def uninterrupted(strategy: str, generator: bool) -> tuple[list[int], dict]:
    """Leaves the first epoch after two steps, goes on there, and trains a second one."""
    training = Training(strategy, generator=generator)
    training.train(training.loader, 2)
    training.train(training.accelerator.skip_first_batches(training.loader))
    training.train(training.loader)
    return training.samples, training.parameters


def interrupted(strategy: str, generator: bool, folder: str, peek: bool) -> list[int]:
    training = Training(strategy, generator=generator)
    training.train(training.loader, 2)
    if peek:
        next(iter(training.loader))
    training.accelerator.save_state(folder)
    return training.samples


def resumed(strategy: str, generator: bool, folder: str, count: int | None) -> tuple[list[int], dict]:
    training = Training(strategy, generator=generator)
    training.accelerator.load_state(folder)
    training.train(training.accelerator.skip_first_batches(training.loader, count))
    training.train(training.loader)
    return training.samples, training.parameters


@pytest.mark.parametrize(
    ("generator", "peek", "count"), [(False, False, None), (True, False, None), (False, True, None), (True, True, 2)]
)
@cells(("lsdp", (2,)))
def test_a_run_that_stops_by_break_resumes_in_mid_epoch(workers, tmp_path, strategy, nodes, generator, peek, count):
    pool, folder = workers(sum(nodes)), str(tmp_path / "state")
    whole = pool.run(uninterrupted, strategy, generator, nodes=nodes)
    first = pool.run(interrupted, strategy, generator, folder, peek, nodes=nodes)
    rest = pool.run(resumed, strategy, generator, folder, count, nodes=nodes)
    for (samples, parameters), before, (after, result) in zip(whole, first, rest, strict=True):
        assert before + after == samples
        assert sorted(samples) == sorted(list(range(SAMPLES)) * 2)
        assert relative_error(result, parameters) == 0


def resumed_by_counting(folder: str) -> tuple[list[int], dict]:
    """The recipe of older scripts: the epoch starts over, and what was trained is left out by counting."""
    training = Training("ddp")
    training.accelerator.load_state(folder)
    for epoch in range(2):
        for step, batch in enumerate(training.loader):
            if epoch == 0 and step < 2:
                continue
            training.train_on(batch)
    return training.samples, training.parameters


def test_a_plain_pass_after_load_state_starts_the_epoch_over(workers, tmp_path):
    pool, folder = workers(2), str(tmp_path / "state")
    whole = pool.run(uninterrupted, "ddp", False, nodes=(1, 1))
    pool.run(interrupted, "ddp", False, folder, False, nodes=(1, 1))
    for (samples, parameters), (after, result) in zip(
        whole, pool.run(resumed_by_counting, folder, nodes=(1, 1)), strict=True
    ):
        assert after == samples[12:]
        assert relative_error(result, parameters) == 0


def fetch_ahead_and_save(strategy: str, folder: str, save_at: int) -> tuple[list[int], list[int]]:
    training = Training(strategy)
    batches = iter(training.loader)
    current, step, saved = next(batches), 0, 0
    while current is not None:
        following = next(batches, None)
        if step == save_at:
            training.accelerator.save_state(folder)
            saved = len(training.samples)
        training.train_on(current)
        current, step = following, step + 1
    return training.samples[:saved], training.samples[saved:]


def check_that_nothing_is_lost(pool, folder: str, strategy: str, nodes: tuple[int, ...], save_at: int) -> None:
    runs = pool.run(fetch_ahead_and_save, strategy, folder, save_at, nodes=nodes)
    for (before, after), (samples, _) in zip(
        runs, pool.run(resumed, strategy, False, folder, None, nodes=nodes), strict=True
    ):
        assert len(before) == save_at * TOTAL
        assert samples[: len(after)] == after and len(samples) == len(after) + SAMPLES


@pytest.mark.parametrize("save_at", [0, 2, 4])
def test_a_script_that_fetches_ahead_loses_no_batch_when_it_resumes(workers, tmp_path, save_at):
    check_that_nothing_is_lost(workers(2), str(tmp_path / "state"), "lsdp", (2,), save_at)


@cells(("ddp", (1, 2)))
def test_so_it_is_everywhere(workers, tmp_path, strategy, nodes):
    check_that_nothing_is_lost(workers(sum(nodes)), str(tmp_path / "state"), strategy, nodes, 2)


def fetch_ahead_over_epochs(folder: str, saves_at: int, generator: bool) -> tuple[list[tuple[int, int]], list[int]]:
    """Fetches the first batch of an epoch before it trains the last one of the epoch before."""
    training = Training("lsdp", generator=generator)
    batches = (batch for loader in repeat(training.loader) for batch in loader)
    following, positions = next(batches), []
    for step in range(9):
        batch, following = following, next(batches)
        training.train_on(batch)
        positions.append((training.loader.position.epoch, training.loader.position.samples))
        if step == saves_at:
            training.accelerator.save_state(folder)
    return positions, training.samples


@pytest.mark.parametrize("generator", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("saves_at", [4, 5, 6])
def test_the_last_batch_of_an_epoch_counts_though_the_next_one_was_begun(workers, tmp_path, saves_at, generator):
    pool, folder = workers(2), str(tmp_path / "state")
    runs = pool.run(fetch_ahead_over_epochs, folder, saves_at, generator, nodes=(2,))
    rest = pool.run(resumed, "lsdp", generator, folder, None, nodes=(2,))
    for (positions, samples), (after, _) in zip(runs, rest, strict=True):
        assert positions[3:7] == [(0, 24), (0, 30), (1, 0), (1, 6)]
        behind = {4: 30, 5: SAMPLES, 6: SAMPLES + TOTAL}[saves_at]
        together = min(len(samples) - behind, len(after))
        assert after[:together] == samples[behind : behind + together]


def leave_out_the_last_batch(folder: str, generator: bool) -> list[int]:
    training = Training("lsdp", generator=generator)
    for batch in training.loader:
        if training.accelerator.gather(batch["index"]).numel() < TOTAL:
            continue
        training.train_on(batch)
    training.accelerator.save_state(folder)
    training.train(training.loader, 2)
    return training.samples[-2 * TOTAL :]


def train_the_next_epoch(folder: str, generator: bool) -> list[int]:
    training = Training("lsdp", generator=generator)
    training.accelerator.load_state(folder)
    training.train(training.loader, 2)
    return training.samples


@pytest.mark.parametrize("generator", [False, True])
def test_an_epoch_that_was_read_to_its_end_is_not_started_over(workers, tmp_path, generator):
    pool, folder = workers(2), str(tmp_path / "state")
    expected = pool.run(leave_out_the_last_batch, folder, generator, nodes=(2,))
    assert pool.run(train_the_next_epoch, folder, generator, nodes=(2,)) == expected


def save_in_the_last_batch(folder: str, generator: bool) -> tuple[list[int], dict]:
    """Saves in the body of the loop, after the last step of the first epoch, and trains two more epochs."""
    training = Training("lsdp", generator=generator)
    for batch in training.loader:
        training.train_on(batch)
        if training.accelerator.completed_steps == len(training.loader):
            training.accelerator.save_state(folder)
    training.train(training.loader)
    training.train(training.loader)
    return training.samples[SAMPLES:], training.parameters


def resume_by_steps(folder: str, generator: bool, recipe: str) -> tuple[list[int], dict]:
    """The recipe of accelerate's examples: how many steps were made tells the epoch, and the batches to skip."""
    training = Training("lsdp", generator=generator)
    training.accelerator.load_state(folder)
    steps = training.accelerator.completed_steps
    epoch, skipped = divmod(steps, len(training.loader))
    assert (epoch, skipped) == (1, 0)
    if recipe == "saves again":
        training.accelerator.save_state(f"{folder} again")
        training.accelerator.load_state(f"{folder} again")
    if recipe == "set_epoch":
        training.loader.set_epoch(epoch)
    if recipe == "a plain pass":  # nothing is to be skipped
        training.train(training.loader)
    elif recipe == "the position":
        training.train(training.accelerator.skip_first_batches(training.loader))  # of which nothing is left
        training.train(training.loader)
    else:
        training.train(training.accelerator.skip_first_batches(training.loader, skipped))
    training.train(training.loader)
    return training.samples, training.parameters


@pytest.mark.parametrize("generator", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_after_a_checkpoint_of_the_last_batch_of_an_epoch_the_next_one_follows(workers, tmp_path, generator):
    pool, folder = workers(2), str(tmp_path / "state")
    whole = pool.run(save_in_the_last_batch, folder, generator, nodes=(2,))
    for recipe in ("the number", "saves again", "set_epoch", "the position", "a plain pass"):
        rest = pool.run(resume_by_steps, folder, generator, recipe, nodes=(2,))
        for (samples, parameters), (after, result) in zip(whole, rest, strict=True):
            assert after == samples, recipe
            assert relative_error(result, parameters) == 0


def save_inside_a_window(strategy: str, folder: str, drop: bool) -> list[int]:
    training = Training(strategy, accumulation=2)
    training.train(training.loader, 3)  # one step, and half of another
    if drop:
        training.model.zero_grad()
    training.accelerator.save_state(folder)
    training.train(training.accelerator.skip_first_batches(training.loader))
    return training.samples[3 * TOTAL :]


def resume_after_a_window(strategy: str, folder: str) -> list[int]:
    training = Training(strategy, accumulation=2)
    training.accelerator.load_state(folder)
    training.train(training.accelerator.skip_first_batches(training.loader))
    return training.samples


@cells(("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (1, 1)))
def test_gradients_of_a_loop_left_inside_a_window_are_not_lost_silently(workers, tmp_path, strategy, nodes):
    pool, folder = workers(sum(nodes)), str(tmp_path / "state")
    errors = pool.run(save_inside_a_window, strategy, folder, False, nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1 and "between backward and" in errors[0].message
    assert not Path(folder).exists()


def test_a_loop_left_inside_a_window_may_drop_its_gradients_and_save(workers, tmp_path):
    pool, folder = workers(2), str(tmp_path / "state")
    rest = pool.run(save_inside_a_window, "ddp", folder, True, nodes=(1, 1))
    assert pool.run(resume_after_a_window, "ddp", folder, nodes=(1, 1)) == rest


def save_before_the_step(strategy: str, folder: str) -> None:
    training = Training(strategy)
    for batch in training.loader:
        training.accelerator.backward(CASE.loss(training.model, batch))
        training.accelerator.save_state(folder)
        training.optimizer.step()


@cells(("ddp", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,)))
def test_saving_between_backward_and_step_is_refused(workers, tmp_path, strategy, nodes):
    arguments = (save_before_the_step, strategy, str(tmp_path / "s"))
    errors = workers(sum(nodes)).run(*arguments, nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1 and "between backward and" in errors[0].message


def save_with_old_gradients(folder: str) -> None:
    """A loop that clears gradients at its beginning, not at its end, has old ones when it saves."""
    training = Training("lsdp")
    for batch in training.loader:
        training.optimizer.zero_grad()
        training.accelerator.backward(CASE.loss(training.model, batch))
        training.optimizer.step()
        training.accelerator.save_state(folder)


def test_gradients_that_were_stepped_do_not_stand_in_the_way_of_saving(workers, tmp_path):
    workers(2).run(save_with_old_gradients, str(tmp_path / "state"), nodes=(2,))
