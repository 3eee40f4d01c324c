# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Losses that a model computes itself: as in one process, or a warning or an error says what cannot be told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from exactness import full
from test_loss_finding import (
    LENGTH,
    TAGS,
    collate,
    listening,
    make_tagger,
    tagged_rows,
    tiny_model,
    turn_dropout_off,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training_cases import Samples, relative_error

from accelerate_lshdp import LSHDPAccelerator, Plan


class Weighted(nn.Module):
    """Its classes have weights, so that its mean is one over the weights of all labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_tagger("labels")

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids)["logits"]
        weights = torch.linspace(0.2, 5.0, TAGS, dtype=torch.float64)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten(), weights), "logits": logits}


class WithoutPads(nn.Module):
    """Marks what has no label by another number than -100, as models of segmentation do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_tagger("labels")

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids)["logits"]
        labels = labels.masked_fill(labels == -100, 255)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=255), "logits": logits}


class ReplacedTokens(nn.Module):
    """A yes or no for each word that is no padding, as ElectraForPreTraining has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_tagger("labels")

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids)["logits"][..., 0]
        words = input_ids != 0
        loss = nn.functional.binary_cross_entropy_with_logits(logits[words], labels[words].to(logits.dtype))
        return {"loss": loss, "logits": logits}


MODELS = {model.__name__: model for model in (Weighted, WithoutPads, ReplacedTokens)}


def rows(name: str) -> Samples:
    tagged = tagged_rows(24)

    def make(index: int, generator: torch.Generator) -> dict[str, Tensor]:
        row = dict(tagged[index])
        if name == "WithoutPads":
            row["labels"] = row["labels"].masked_fill(row["labels"] == -100, 255)
        if name == "ReplacedTokens":
            row["labels"] = torch.randint(0, 2, (LENGTH,), generator=generator)
            row["input_ids"][0] = 1
        return row

    return Samples(24, make)


def train_own(name: str, open_plan: bool) -> list[str]:
    plan = Plan.auto(strategy="ddp") if open_plan else Plan.from_batch_sizes([6, 2], strategy="ddp")
    accelerator = LSHDPAccelerator(plan=plan)
    model = MODELS[name]().double()
    loader = DataLoader(rows(name), batch_size=4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    model.train()
    with listening() as told:
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return told


@pytest.mark.parametrize("open_plan", [False, True], ids=["unequal", "automatic"])
@pytest.mark.parametrize("name", MODELS)
def test_a_mean_over_something_else_is_told_of_once(workers, name, open_plan):
    told, elsewhere = workers(2).run(train_own, name, open_plan, nodes=(1, 1))
    assert len(told) == 1 and "not one that can be recognised" in told[0] and "LSDP_LOSS_WEIGHTING" in told[0]
    assert elsewhere == []


def one_step(name: str, how: str) -> tuple[dict, str]:
    """On unequal parts of a batch."""
    model, batch = tiny_model(name)
    turn_dropout_off(model.double())
    samples = [{key: values[index] for key, values in batch.items()} for index in range(8)]
    accelerator = LSHDPAccelerator(plan=Plan.from_batch_sizes([6, 2], strategy="ddp"))
    loader = DataLoader(samples, batch_size=4, collate_fn=collate)
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    if how == "compiled":
        model.compile(backend="eager")
    for part in loader:
        output = model(**part, return_dict=how != "tuples")
        accelerator.backward(output.loss if isinstance(output, Mapping) else output[0])
    gradients = {
        name.removeprefix("_orig_mod."): full(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }
    return gradients, accelerator.session.losses.findings["loop"]["loss 0"]["composition"]


@pytest.mark.parametrize("how", ["tuples", "wrapped"])
def test_a_loss_is_seen_in_tuples_and_of_wrapped_models(workers, how):
    model, batch = tiny_model("GPT2LMHeadModel")
    turn_dropout_off(model.double())
    model(**batch).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradients, found in workers(2).run(one_step, "GPT2LMHeadModel", how, nodes=(1, 1)):
        assert found == "SHIFTED_LABELS"
        assert relative_error(gradients, expected) <= 1e-6  # transformers computes losses in fp32


def test_the_loss_of_a_compiled_model_has_to_be_told(workers):
    errors = workers(2).run(one_step, "GPT2LMHeadModel", "compiled", nodes=(1, 1), expect_failure=True)
    assert len({error.message for error in errors}) == 1
    assert "compiled model" in errors[0].message and "loss_weighting='sample'" in errors[0].message
