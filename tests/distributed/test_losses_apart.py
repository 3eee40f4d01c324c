# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Losses that look alike in some batches, or come in turn, count as in one process, or a warning says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import full
from test_loss_finding import LENGTH, TAGS, collate, listening, make_tagger, tag_loss, tagged_rows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training_cases import Samples, make_optimizer, relative_error

from accelerate_lshdp import LSHDPAccelerator, Plan


def sums_of_rows(model: nn.Module, batch: dict) -> Tensor:
    logits = model(batch["input_ids"])["logits"]
    return tag_loss(logits, batch["labels"], "labels", "sum") / len(logits)


def mean_over_positions(model: nn.Module, batch: dict) -> Tensor:
    logits = model(batch["input_ids"])["logits"]
    return cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean()


def mean_of_rows(model: nn.Module, batch: dict) -> Tensor:
    logits = model(batch["input_ids"])["logits"]
    values = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return (values.sum(1) / batch["labels"].ne(-100).sum(1).clamp(min=1)).mean()


def own_loss(model: nn.Module, batch: dict) -> Tensor:
    return model(**batch)["loss"]


def first_labels(model: nn.Module, batch: dict) -> Tensor:
    return cross_entropy(model(batch["input_ids"])["logits"].mean(dim=1), batch["labels"])


LOSSES = {loss.__name__: loss for loss in (sums_of_rows, mean_over_positions, mean_of_rows, own_loss, first_labels)}


def classified_rows(size: int) -> Samples:
    def make(index: int, generator: torch.Generator) -> dict[str, Tensor]:
        words = torch.randint(1, TAGS, (LENGTH,), generator=generator)
        return {"input_ids": words, "labels": torch.randint(0, TAGS, (), generator=generator)}

    return Samples(size, make)


def data_of(name: str, size: int) -> Samples:
    return classified_rows(size) if name == "first_labels" else tagged_rows(size)


def one_process(names: list[str], size: int, total: int) -> dict[str, Tensor]:
    model = make_tagger("labels")
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for name in names:
        data = data_of(name, size)
        for start in range(0, size, total):
            batch = collate([data[index] for index in range(start, min(start + total, size))])
            LOSSES[name](model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(names: list[str], sizes: list, size: int, gathers: bool = False) -> tuple[dict, list, dict]:
    """Each loss for an epoch of its data, one after the other."""
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes(sizes, strategy="ddp", allow_unequal_accumulation=True))
    model = make_tagger("labels")
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loaders = [DataLoader(data_of(name, size), batch_size=2, collate_fn=collate) for name in names]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    model.train()
    with listening() as told:
        for name, loader in zip(names, loaders, strict=True):
            for batch in loader:
                with accelerator.accumulate(model):
                    if gathers and accelerator.sync_gradients:
                        accelerator.gather(torch.ones(1))
                    accelerator.backward(LOSSES[name](model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
    found: dict[str, Any] = accelerator.session.losses.findings["loop"]
    return {name: full(parameter) for name, parameter in model.named_parameters()}, told, found


@pytest.mark.parametrize("name", ["sums_of_rows", "mean_over_positions"])
@pytest.mark.parametrize("sizes", [[2, 2], [3, 1]], ids=str)
def test_sums_of_rows_are_means_over_samples_also_where_batches_are_equal_at_first(workers, name, sizes):
    expected = one_process([name], 23, 4)
    for parameters, _, found in workers(2).run(train, [name], sizes, 23, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12
        assert all(one["composition"] == "SAMPLES" for one in found.values())


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1]], ids=str)
def test_another_loss_after_the_first_is_found_for_itself(workers, sizes):
    names = ["first_labels", "own_loss"]
    expected = one_process(names, 48, 4)
    for parameters, _, found in workers(2).run(train, names, sizes, 48, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12
        assert found["loss 1"]["composition"] == "LABELS"


def test_a_collective_before_the_forward_does_not_let_the_last_step_be_looked_at(workers):
    expected = one_process(["own_loss"], 22, 4)
    for parameters, _, _ in workers(2).run(train, ["own_loss"], [(1, 3), (1, 1)], 22, True, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12


def test_one_row_a_micro_batch_is_told_of_where_it_makes_a_difference(workers):
    (_, told, found), _ = workers(2).run(train, ["mean_of_rows"], [1, 1], 36, nodes=(1, 1))
    assert any("it cannot be told yet what the loss is" in text for text in told)
    assert found == {}


def nothing_where_no_label_counts(model: nn.Module, batch: dict) -> Tensor:
    logits, kept = model(batch["input_ids"])["logits"], batch["labels"] != -100
    return cross_entropy(logits[kept], batch["labels"][kept]) if kept.any() else logits.sum() * 0


class Sparse(Samples):
    """Some rows have no labels, so that micro-batches of one row have none, on one rank or the other."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = dict(super().__getitem__(index))
        if index % 7 in (2, 3):
            row["labels"] = torch.full_like(row["labels"], -100)
        return row


def sparse_rows(size: int) -> Sparse:
    tagged = tagged_rows(4 * size)
    rows = [row for row in (tagged[index] for index in range(4 * size)) if (row["labels"] != -100).any()]
    return Sparse(size, lambda index, _: rows[index])


def train_with_empty_micro_batches(sizes: list) -> tuple[dict, dict]:
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes(sizes, strategy="ddp"))
    model = make_tagger("labels")
    loader = DataLoader(sparse_rows(36), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nothing_where_no_label_counts(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return {
        name: full(parameter) for name, parameter in model.named_parameters()
    }, accelerator.session.losses.findings["loop"]


@pytest.mark.parametrize("sizes", [[(1, 2), (1, 2)], [(2, 2), (1, 2)]], ids=str)
def test_a_rank_may_have_no_loss_in_a_micro_batch(workers, sizes):
    """The operation that makes its loss is another one there than on the other rank, which must not be waited for."""
    total = sum(size * steps for size, steps in sizes)
    model = make_tagger("labels")
    optimizer = make_optimizer(model, 1e-2, 0.0)
    data = sparse_rows(36)
    for start in range(0, 36, total):
        batch = collate([data[index] for index in range(start, min(start + total, 36))])
        nothing_where_no_label_counts(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters, found in workers(2).run(train_with_empty_micro_batches, sizes, nodes=(1, 1), timeout=40):
        assert relative_error(parameters, expected) <= 1e-12
        # Of one row at a time, means over rows are the same.
        assert "LABELS" in {each["composition"] for each in found.values()} or sizes[0][0] == 1


def losses_that_no_step_follows() -> int:
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([2, 1], strategy="ddp"))
    model = make_tagger("labels")
    loader = DataLoader(tagged_rows(360), batch_size=1, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)
    model.train()
    with accelerator.no_sync(model):
        for batch in loader:
            accelerator.backward(sums_of_rows(model, batch))
    return len(accelerator.session.losses.finder._reports._unheard)


def test_what_is_told_of_losses_is_not_kept_where_no_step_follows(workers):
    assert max(workers(2).run(losses_that_no_step_follows, nodes=(1, 1))) <= 64


def train_two_losses_in_turns(sizes: list) -> dict:
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes(sizes, strategy="ddp"))
    model = make_tagger("labels")
    loader = DataLoader(sparse_rows(36), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, 1e-2, 0.0), loader)
    model.train()
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = own_loss(model, batch) if number % 2 == 0 else model(batch["input_ids"])["logits"].square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.session.losses.findings["loop"]


def test_another_loss_in_a_later_micro_batch_is_an_error_on_all_ranks(workers):
    errors = workers(2).run(train_two_losses_in_turns, [(2, 2), (1, 2)], nodes=(1, 1), expect_failure=True, timeout=40)
    assert len({error.message for error in errors}) == 1
    assert "another one than that of its first micro-batch" in errors[0].message
