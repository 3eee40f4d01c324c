# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A batch keeps its place whatever the script does with it: skipped, kept, fetched ahead, trained twice.

Every pattern trains the gradient of the global batches that it names, as one process does, or is refused on all ranks
with the same message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from exactness import full
from strategy_cells import CELLS, cell_id, cells, gathers
from torch import nn
from torch.utils.data import DataLoader, Subset
from training_cases import CASES, collate, make_optimizer, reference_run, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


CASE = CASES["vit"]
#: Six global batches of six samples, the last one short.
BATCHES = [list(range(start, min(start + 6, 33))) for start in range(0, 33, 6)]
SIZES = {2: (4, 2), 3: (3, 2, 1), 4: (2, 2, 1, 1)}


def plan_of(strategy: str, sizes: tuple[int, ...] | None) -> Plan:
    placing = (
        {"strategy": "lsdp", "intra_node": "collectives"} if strategy == "collectives" else {"strategy": strategy}
    )
    return Plan.equal(**placing) if sizes is None else Plan.from_batch_sizes(sizes, **placing)


class Script:
    """What a script has after ``prepare``, and one training step of it."""

    def __init__(
        self, strategy: str, *, equal: bool = False, accumulation: int = 1, sizes: Any = None, weighting: str = "auto"
    ) -> None:
        world = LSHDPAccelerator(plan=Plan.equal(strategy="ddp")).num_processes
        chosen = sizes or (None if equal else SIZES[world])
        self.accelerator = LSHDPAccelerator(
            plan=plan_of(strategy, chosen),
            lsdp_plugin=LSDPPlugin(loss_weighting=weighting),
            gradient_accumulation_steps=accumulation,
        )
        self.batch_size = 6 // world
        model = CASE.model().double()
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, make_optimizer(model, 1e-2, 0.0), self.new_loader(range(33))
        )
        self.model.train()

    def new_loader(self, indices: range, batch_size: int | None = None) -> DataLoader:
        data = Subset(CASE.dataset(33, torch.float64), indices)
        return DataLoader(data, batch_size=batch_size or self.batch_size, collate_fn=collate)

    def train_on(self, *batches: dict, copied: bool = False) -> None:
        with self.accelerator.accumulate(self.model):
            for batch in batches:
                given = {name: tensor.clone() for name, tensor in batch.items()} if copied else batch
                self.accelerator.backward(CASE.loss(self.model, given))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def validate(self, loader: DataLoader) -> None:
        with torch.no_grad():
            for batch in loader:
                CASE.loss(self.model, batch)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: full(parameter) for name, parameter in self.model.named_parameters()}


# The patterns: each trains, and says on which global batches and with which accumulation


def skips_by_counting(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    for step, batch in enumerate(script.loader):
        if step < 2:
            continue
        script.train_on(batch)
    assert script.accelerator.samples_seen == 33 - 12
    return script, BATCHES[2:], 1


def skips_by_counting_with_accumulation(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy, accumulation=2)
    for step, batch in enumerate(script.loader):
        if step < 2:
            continue
        script.train_on(batch)
    return script, BATCHES[2:], 2


def keeps_all_batches(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    kept = list(script.loader)
    for batch in kept * 2:
        script.train_on(batch)
    assert script.accelerator.samples_seen == 66
    return script, BATCHES * 2, 1


def keeps_all_batches_of_an_equal_plan(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy, equal=True)
    kept = list(script.loader)
    for batch in kept[::-1] * 2:
        script.train_on(batch)
    total = script.batch_size * script.accelerator.num_processes
    batches = [list(range(start, min(start + total, 33))) for start in range(0, 33, total)]
    return script, batches[::-1] * 2, 1


def keeps_all_batches_and_accumulates(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy, accumulation=3)
    kept = list(script.loader)
    for batch in kept * 2:
        script.train_on(batch)
    return script, BATCHES * 2, 3


def fetched_ahead(loader: DataLoader) -> Iterator[dict]:
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current


def fetches_ahead(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    for batch in fetched_ahead(script.loader):
        script.train_on(batch)
    return script, BATCHES, 1


def fetches_ahead_and_accumulates(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy, accumulation=2)
    for batch in fetched_ahead(script.loader):
        script.train_on(batch)
    return script, BATCHES, 2


def validates_in_train_mode(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    # Of another size than the training batches, and with a last batch that its loop leaves behind.
    held_out = script.accelerator.prepare(script.new_loader(range(11)))
    for step, batch in enumerate(script.loader):
        if step % 2 == 0:
            script.validate(held_out)
        script.train_on(batch, copied=step == 3)
    return script, BATCHES, 1


def trains_each_batch_of_a_kept_window_twice(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    batches = iter(script.loader)
    while window := list(islice(batches, 3)):
        for batch in window * 2:
            script.train_on(batch)
    return script, BATCHES[:3] * 2 + BATCHES[3:] * 2, 1


def gives_the_model_copies(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    labels = []  # as for a metric: parts of trained batches stay alive
    for batch in script.loader:
        script.train_on(batch, copied=True)
        labels.append(batch["labels"])
    return script, BATCHES, 1


def gives_the_model_copies_outside_accumulate(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    for batch in script.loader:
        copy = {name: tensor.clone() for name, tensor in batch.items()}
        script.accelerator.backward(CASE.loss(script.model, copy))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script, BATCHES, 1


def gives_the_model_copies_and_drops_the_batch(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    for batch in ({name: tensor.clone() for name, tensor in batch.items()} for batch in script.loader):
        script.train_on(batch)
    return script, BATCHES, 1


def looks_at_a_first_batch(strategy: str) -> tuple[Script, list, int]:
    script = Script(strategy)
    first = next(iter(script.loader))
    for batch in script.loader:
        script.train_on(batch, copied=True)
    assert len(first) == 2
    return script, BATCHES, 1


PATTERNS = (
    skips_by_counting,
    skips_by_counting_with_accumulation,
    keeps_all_batches,
    keeps_all_batches_of_an_equal_plan,
    keeps_all_batches_and_accumulates,
    fetches_ahead,
    fetches_ahead_and_accumulates,
    validates_in_train_mode,
    trains_each_batch_of_a_kept_window_twice,
    gives_the_model_copies,
    gives_the_model_copies_outside_accumulate,
    gives_the_model_copies_and_drops_the_batch,
    looks_at_a_first_batch,
)


def error_of(name: str, strategy: str) -> float:
    """Runs on every rank: how far a pattern's parameters are from those of one process."""
    script, batches, accumulation = globals()[name](strategy)
    expected = reference_run(
        "vit",
        torch.float64,
        batches,
        weighting="sample",
        steps=len(batches) // accumulation,
        lr=1e-2,
        weight_decay=0.0,
        max_grad_norm=None,
        gradient_accumulation_steps=accumulation,
    )
    return relative_error(script.parameters, expected.parameters)


def patterns_in_cells() -> list[Any]:
    """Every pattern in every cell; two a pattern, and each cell at least once, in the default suite.

    One of the two has more than two ranks: only there has a rank another share of the last, short batch.
    """
    default = {(number, cell) for number in range(len(PATTERNS)) for cell in (number % 8, 8 + (number + 5) % 8)}
    assert {cell for _, cell in default} == set(range(len(CELLS)))
    return [
        pytest.param(
            pattern.__name__,
            *place,
            id=f"{pattern.__name__}-{cell_id(*place)}",
            marks=[] if (number, cell) in default else [pytest.mark.slow],
        )
        for number, pattern in enumerate(PATTERNS)
        for cell, place in enumerate(CELLS)
    ]


@pytest.mark.parametrize(("name", "strategy", "nodes"), patterns_in_cells())
def test_a_batch_keeps_its_place(workers, name, strategy, nodes):
    for error in workers(sum(nodes)).run(error_of, name, strategy, nodes=nodes):
        assert error <= 1e-12


def skip_to_the_last_window(strategy: str) -> tuple[dict, int]:
    """It has two batches, the others four: the place of a batch that was skipped ends no window."""
    script = Script(strategy, accumulation=4)
    for step, batch in enumerate(script.loader):
        if step >= 4:
            script.train_on(batch)
    return script.parameters, script.accelerator.completed_steps


@cells(("ddp", (1, 1)), ("lsdp", (1, 2)))
def test_the_last_window_is_stepped_though_the_others_were_skipped(workers, strategy, nodes):
    expected = summed_losses([BATCHES[4:]], accumulation=4)
    for parameters, steps in workers(sum(nodes)).run(skip_to_the_last_window, strategy, nodes=nodes):
        assert steps == 1 and relative_error(parameters, expected) <= 1e-12


# Two loaders in one loss


def train_two_loaders(strategy: str, equal: bool, second: tuple[int, int], rounds: int) -> dict:
    script = Script(strategy, equal=equal)
    size, count = second
    other = script.accelerator.prepare(script.new_loader(range(count), size))
    for one, two in islice(zip(script.loader, cycle(other), strict=False), rounds):
        script.accelerator.backward(CASE.loss(script.model, one) + CASE.loss(script.model, two))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.parameters


def summed_losses(steps: list[list[list[int]]], accumulation: int = 1) -> dict:
    """Each step is made with the sum of the losses of some batches."""
    model, dataset = CASE.model().double(), CASE.dataset(33, torch.float64)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for batches in steps:
        loss = sum(CASE.loss(model, collate([dataset[index] for index in batch])) for batch in batches)
        (loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def require_equal_shares_are_exact(workers, strategy: str, nodes: tuple[int, ...], second: int) -> None:
    """All ranks have the same share of both loaders: 6 // ranks samples of one, ``second`` of the other."""
    ranks = sum(nodes)
    sizes = (6 // ranks, second)
    steps = [[list(range(step * size * ranks, (step + 1) * size * ranks)) for size in sizes] for step in (0, 1)]
    both = (second, 2 * second * ranks)
    for parameters in workers(ranks).run(train_two_loaders, strategy, True, both, 2, nodes=nodes):
        assert relative_error(parameters, summed_losses(steps)) <= 1e-12


@cells(("ddp", (1, 1)), ("lsdp", (2,)))
def test_two_loaders_of_different_batch_size_in_one_loss_are_exact(workers, strategy, nodes):
    require_equal_shares_are_exact(workers, strategy, nodes, 4)


@pytest.mark.parametrize(("strategy", "nodes"), [("ddp", (1, 1)), ("lsdp", (2,))])
def test_two_loaders_of_which_one_has_an_odd_batch_size(workers, strategy, nodes):
    require_equal_shares_are_exact(workers, strategy, nodes, 5)


@cells(("ddp", (2,)), ("lsdp", (2,)))
def test_two_loaders_with_other_shares_on_one_rank_are_refused_on_all(workers, strategy, nodes):
    """The last batches, of 3 samples and of 1, are 2 + 1 and 1 + 0 on two ranks."""
    arguments = (train_two_loaders, strategy, False, (6 // sum(nodes), 31), 6)
    errors = workers(sum(nodes)).run(*arguments, expect_failure=True, nodes=nodes)
    assert len({error.message for error in errors}) == 1 and "count differently" in errors[0].message


def train_beside_a_validation(strategy: str) -> int:
    """One that is kept open begins after a batch was fetched, whose inputs the script changes."""
    script = Script(strategy)
    held_out, validation = script.accelerator.prepare(script.new_loader(range(33))), None
    for number, batch in enumerate(script.loader):
        if number % 3 == 0:
            script.model.eval()
            validation = validation or iter(held_out)
            with torch.no_grad():
                CASE.loss(script.model, next(validation))
            script.model.train()
        noisy = script.model(pixel_values=batch["pixel_values"] + 0.1).logits
        script.accelerator.backward(nn.functional.cross_entropy(noisy, batch["labels"]))
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.accelerator.samples_seen


@pytest.mark.parametrize("strategy", ["ddp", "lsdp"])
def test_a_validation_that_begins_after_a_batch_was_fetched_does_not_have_it(workers, strategy):
    assert workers(2).run(train_beside_a_validation, strategy, nodes=(2,)) == [33, 33]


# What nothing tells


def train_copies_of_kept_batches(strategy: str) -> None:
    script = Script(strategy)
    kept = list(script.loader)
    script.train_on(kept[2], copied=True)


def train_copies_of_batches_fetched_ahead(strategy: str) -> None:
    script = Script(strategy)
    for batch in fetched_ahead(script.loader):
        script.train_on(batch, copied=True)


def keep_a_copied_batch_on_one_rank(strategy: str) -> None:
    script = Script(strategy)
    kept = []
    for step, batch in enumerate(script.loader):
        if script.accelerator.process_index == 1 and step < 2:
            kept.append(batch)
        if step >= 2:
            script.train_on(batch, copied=True)


@cells(("ddp", (2,)), ("lsdp", (2,)))
@pytest.mark.parametrize(
    "train",
    [train_copies_of_kept_batches, train_copies_of_batches_fetched_ahead, keep_a_copied_batch_on_one_rank],
)
def test_a_batch_that_cannot_be_told_from_others_is_an_error_on_all_ranks(workers, strategy, nodes, train):
    errors = workers(sum(nodes)).run(train, strategy, expect_failure=True, nodes=nodes)
    expected = ["of which batch the loss is"]
    if train is keep_a_copied_batch_on_one_rank:
        expected.append("not in step")  # found before by what ranks tell each other of a loss, where they do
    assert len({error.message for error in errors}) == 1 and any(text in errors[0].message for text in expected)


def begin_inside_a_window(strategy: str) -> None:
    script = Script(strategy, accumulation=2)
    for step, batch in enumerate(script.loader):
        if step >= 3:
            script.train_on(batch)


@cells(("ddp", (2,)), ("lsdp", (2, 2)))
def test_leaving_out_the_start_of_an_accumulation_window_is_an_error_on_all_ranks(workers, strategy, nodes):
    errors = workers(sum(nodes)).run(begin_inside_a_window, strategy, expect_failure=True, nodes=nodes)
    assert len({error.message for error in errors}) == 1 and "in the middle of the batches" in errors[0].message


# Batches without tensors


class Numbers:
    """A batch that holds no tensor."""

    def __init__(self, samples: list) -> None:
        self.samples = [(sample["pixel_values"].tolist(), int(sample["labels"])) for sample in samples]

    def tensors(self) -> dict[str, torch.Tensor]:
        pixels, labels = zip(*self.samples, strict=True)
        return {"pixel_values": torch.tensor(pixels, dtype=torch.float64), "labels": torch.tensor(labels)}


def train_without_tensors(strategy: str, ahead: bool) -> dict:
    script = Script(strategy)
    loader = DataLoader(CASE.dataset(33, torch.float64), batch_size=3, collate_fn=Numbers)
    loader = script.accelerator.prepare(loader)
    for batch in fetched_ahead(loader) if ahead else loader:
        script.train_on(batch.tensors())
    return script.parameters


def test_batches_without_tensors_are_taken_in_order_while_one_waits(workers):
    for parameters in workers(2).run(train_without_tensors, "lsdp", False, nodes=(2,)):
        assert relative_error(parameters, plain(BATCHES)) <= 1e-12
    errors = workers(2).run(train_without_tensors, "lsdp", True, expect_failure=True, nodes=(2,))
    assert len({error.message for error in errors}) == 1 and "of which batch the loss is" in errors[0].message


def plain(batches: list[list[int]]) -> dict:
    options = {"weighting": "sample", "steps": len(batches), "lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": None}
    return reference_run("vit", torch.float64, batches, **options).parameters


# Views


class Slices:
    """A dataset that is read in whole batches: each is a view of all data, as of a memory-mapped file."""

    def __init__(self) -> None:
        self.data = collate([CASE.dataset(33, torch.float64)[index] for index in range(33)])

    def __len__(self) -> int:
        return 33

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {name: tensor[indices[0] : indices[-1] + 1] for name, tensor in self.data.items()}


def train_views(strategy: str) -> dict:
    script = Script(strategy)
    loader = script.accelerator.prepare(DataLoader(Slices(), batch_size=3, collate_fn=lambda batch: batch))
    for _ in range(2):
        kept = list(loader)
        for batch in kept:
            script.train_on({name: tensor[:] for name, tensor in batch.items()})
        del kept, batch
    return script.parameters


def test_batches_that_are_views_of_the_dataset_are_recognised(workers):
    for parameters in workers(2).run(train_views, "lsdp", nodes=(2,)):
        assert relative_error(parameters, plain(BATCHES * 2)) <= 1e-12


def take_gradients_of_each_sample() -> list[tuple]:
    """As in torch.func's tutorials, where tensors have no storage."""
    accelerator = LSHDPAccelerator(plan=Plan.equal(strategy="ddp"))
    model = nn.Linear(4, 1).double()
    loader = DataLoader(torch.ones(8, 4, dtype=torch.float64), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    shapes = []
    for batch in loader:
        detached = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters: dict, sample: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (sample[None],)).sum()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, batch)
        shapes.append(tuple(gradients["weight"].shape))
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    return shapes


def test_a_prepared_model_goes_through_the_transforms_of_torch(workers):
    (shapes,) = workers(1).run(take_gradients_of_each_sample)
    assert shapes == [(4, 1, 4)] * 2


def leave_out_a_model(strategy: str, on_rank: int) -> tuple[dict, dict]:
    script = Script(strategy)
    torch.manual_seed(1)
    scale = nn.Linear(1, 1, dtype=torch.float64)
    scale, optimizer = script.accelerator.prepare(scale, torch.optim.SGD(scale.parameters(), lr=0.1))
    for batch in script.loader:
        loss = CASE.loss(script.model, batch)
        if script.accelerator.process_index != on_rank:
            loss = loss + scale(batch["pixel_values"].new_ones(1, 1)).sum()
        script.accelerator.backward(loss)
        for each in (script.optimizer, optimizer):
            each.step()
            each.zero_grad()
    return script.parameters, {name: full(parameter) for name, parameter in scale.named_parameters()}


WHOLE_HERE = [cell for cell in CELLS if not gathers(*cell)]
GATHERING = [cell for cell in CELLS if gathers(*cell)]
#: What part of a batch of six samples, and of one of three, the ranks but the first have, by number of ranks.
SHARES_OF_THE_OTHERS = {2: {6: 1 / 3, 3: 1 / 3}, 3: {6: 1 / 2, 3: 1 / 3}, 4: {6: 2 / 3, 3: 2 / 3}}


@cells(("ddp", (1, 1)), ("lsdp", (2,)), ("collectives", (1, 1)), among=WHOLE_HERE)
def test_a_model_that_one_rank_leaves_out_of_its_loss_gets_the_gradient_of_the_others(workers, strategy, nodes):
    torch.manual_seed(1)
    scale = nn.Linear(1, 1, dtype=torch.float64)
    for batch in BATCHES:
        for parameter in scale.parameters():
            parameter.data -= 0.1 * SHARES_OF_THE_OTHERS[sum(nodes)][len(batch)]
    for parameters, scaled in workers(sum(nodes)).run(leave_out_a_model, strategy, 0, nodes=nodes):
        assert relative_error(parameters, plain(BATCHES)) <= 1e-12
        assert relative_error(scaled, dict(scale.named_parameters())) <= 1e-12


def leave_out_a_shared_model(strategy: str, under_no_sync: bool) -> None:
    """On rank 1, in the second step, with a forward of it: ranks gather its parameters."""
    script = Script(strategy, equal=True)
    other = CASE.model().double()
    other, optimizer = script.accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    other.train()
    for number, batch in enumerate(script.loader):
        deviates = number == 1 and script.accelerator.process_index == 1
        with other.no_sync() if deviates and under_no_sync else contextlib.nullcontext():
            second = CASE.loss(other, batch)
        loss = CASE.loss(script.model, batch)
        script.accelerator.backward(loss if deviates else loss + second)
        for each in (script.optimizer, optimizer):
            each.step()
            each.zero_grad()


@cells(("fsdp", (2,)), ("zero2", (1, 1)), ("collectives", (2,)), among=GATHERING)
def test_leaving_out_a_model_that_ranks_share_is_an_error_on_all_before_the_backward(workers, strategy, nodes):
    errors = workers(sum(nodes)).run(leave_out_a_shared_model, strategy, False, nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1 and "losses of different models" in errors[0].message


@cells(("ddp", (1, 1)), ("lsdp", (2,)), among=WHOLE_HERE)
def test_a_model_that_one_rank_has_under_no_sync_is_an_error_on_all(workers, strategy, nodes):
    errors = workers(sum(nodes)).run(leave_out_a_shared_model, strategy, True, nodes=nodes, expect_failure=True)
    assert len({error.message for error in errors}) == 1 and "under no_sync only" in errors[0].message
