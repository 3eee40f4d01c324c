# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``gather_for_metrics`` in training passes: of the batch at hand, whether it is trained or not."""

from __future__ import annotations

import pytest
import torch
from test_batch_identity import CASE, Script, fetched_ahead
from torch import nn
from torch.utils.data import DataLoader


def predictions_of(script: Script, loader: DataLoader, changed: bool) -> list[int]:
    """Rows of each batch of a validation that forgets ``model.eval()``."""
    rows = []
    with torch.no_grad():
        for batch in loader:
            pixels = batch["pixel_values"] * 2 if changed else batch["pixel_values"]
            logits = script.model(pixel_values=pixels).logits
            rows.append(len(script.accelerator.gather_for_metrics(logits)))
    return rows


def validate_in_train_mode(changed: bool) -> tuple[list[list[int]], list[int]]:
    """13 samples are cut into 6, 6 and 1, which rank 1 has none of. So is the last batch of 31 that is trained."""
    script = Script("ddp")
    train = script.accelerator.prepare(script.new_loader(range(31)))
    held_out, even = (script.accelerator.prepare(script.new_loader(range(count))) for count in (13, 24))
    rows, trained = [predictions_of(script, held_out, changed)], []
    for number, batch in enumerate(train):
        script.train_on(batch)
        if number == 2:
            rows.append(predictions_of(script, held_out, changed))
        trained.append(len(script.accelerator.gather_for_metrics(batch["labels"] + 0)))
    del batch
    rows += [predictions_of(script, even, changed), predictions_of(script, held_out, changed)]
    return rows, trained


@pytest.mark.parametrize("changed", [False, True])
def test_metrics_of_a_validation_in_train_mode_are_of_its_batches(workers, changed):
    for rows, trained in workers(2).run(validate_in_train_mode, changed, nodes=(2,)):
        assert rows == [[6, 6, 1], [6, 6, 1], [6] * 4, [6, 6, 1]]
        assert trained == [6, 6, 6, 6, 6, 1]


def gather_before_backward(changed: bool, ahead: bool) -> list[int]:
    script = Script("ddp")
    loader = script.accelerator.prepare(script.new_loader(range(13)))
    rows = []
    for _ in range(2):
        for batch in fetched_ahead(loader) if ahead else loader:
            pixels = batch["pixel_values"] * 2 if changed else batch["pixel_values"]
            logits = script.model(pixel_values=pixels).logits
            rows.append(len(script.accelerator.gather_for_metrics(logits.argmax(-1))))
            script.accelerator.backward(nn.functional.cross_entropy(logits, batch["labels"]))
            script.optimizer.step()
            script.optimizer.zero_grad()
    return rows


@pytest.mark.parametrize(("changed", "ahead"), [(False, False), (True, False), (False, True)])
def test_metrics_before_the_backward(workers, changed, ahead):
    assert workers(2).run(gather_before_backward, changed, ahead, nodes=(2,)) == [[6, 6, 1] * 2] * 2


def gather_after_training() -> list[int]:
    """The last batch that was trained left rank 1 without a sample; what follows is of no prepared loader."""
    script = Script("ddp")
    loader = script.accelerator.prepare(script.new_loader(range(13)))
    for batch in fetched_ahead(loader):
        script.train_on(batch)
    rows, data = [], CASE.dataset(33, torch.float64)
    with torch.no_grad():
        for count in (3, 2):
            pixels = torch.stack([data[index]["pixel_values"] for index in range(count)])
            rows.append(len(script.accelerator.gather_for_metrics(script.model(pixel_values=pixels).logits)))
    return rows


def test_metrics_of_no_loader_after_the_last_batch(workers):
    assert workers(2).run(gather_after_training, nodes=(2,)) == [[6, 4]] * 2


def keep_a_short_batch() -> list[int]:
    """Labels say of which batch they are, whatever was trained since."""
    script = Script("ddp")
    loader = script.accelerator.prepare(script.new_loader(range(13)))
    kept = list(loader)
    for batch in kept[::-1]:
        script.accelerator.backward(CASE.loss(script.model, batch))
    return [len(script.accelerator.gather_for_metrics(batch["labels"])) for batch in kept]


def test_tensors_of_a_batch_tell_of_which_it_is(workers):
    assert workers(2).run(keep_a_short_batch, nodes=(2,)) == [[6, 6, 1]] * 2
