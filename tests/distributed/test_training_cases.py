# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The oracle and the data of the training tests: deterministic, and right where something else can tell."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from training_cases import (
    CASES,
    collate,
    image_dataset,
    make_optimizer,
    reference_run,
    relative_error,
    text_dataset,
    text_loss,
    tiny_gpt2,
)


RUN = {"steps": 2, "lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
BATCHES = [list(range(8)), list(range(8, 16)), [16, 17, 18, 19, 20], list(range(21, 32))]


def model_sums(names: tuple[str, ...]) -> list[float]:
    torch.manual_seed(dist.get_rank() + 1)
    return [sum(p.double().sum().item() for p in CASES[name].model().parameters()) for name in names]


def test_models_are_the_same_on_every_rank(workers):
    first, second = workers(2).run(model_sums, ("vit", "gpt2"))
    assert first == second


def test_building_a_model_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_gpt2()
    assert torch.equal(torch.rand(3), expected)


def test_gpt2_is_tied():
    model = tiny_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("make", [image_dataset, text_dataset])
def test_longer_datasets_start_with_the_shorter(make):
    short, long = collate(list(make(5))), collate(list(make(9)))
    assert all(torch.equal(short[name], long[name][:5]) for name in short)
    assert not torch.equal(collate([make(9)[0]])["labels"], collate([make(9)[1]])["labels"])


def test_text_lengths_vary_and_can_leave_no_label():
    lengths = {int(sample["attention_mask"].sum()) for sample in text_dataset(32)}
    assert len(lengths) > 4 and min(lengths) >= 2
    sample = text_dataset(4, without_tokens=[2])[2]
    assert (sample["labels"][1:] == -100).all() and sample["labels"][0] > 0


def test_text_loss_is_that_of_transformers():
    model, batch = tiny_gpt2(), collate(list(text_dataset(6)))
    torch.testing.assert_close(text_loss(model, batch), model(**batch).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["vit", "gpt2"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_reference_is_the_gradient_of_the_samples_one_by_one(name, accumulation):
    case = CASES[name]
    result = reference_run(
        name, torch.float64, BATCHES, weighting=case.weighting, gradient_accumulation_steps=accumulation, **RUN
    )
    model, dataset = case.model().double(), case.dataset(32, torch.float64)
    optimizer = make_optimizer(model, RUN["lr"], RUN["weight_decay"])
    for step in range(RUN["steps"]):
        window = BATCHES[step * accumulation : (step + 1) * accumulation]
        parts = [[case.loss_sum(model, collate([dataset[i]])) for i in batch] for batch in window]
        counts = [sum(count for _, count in batch) for batch in parts]
        for batch, count in zip(parts, counts, strict=True):
            divisor = sum(counts) if name == "gpt2" else count * accumulation
            for loss, _ in batch:
                (loss / divisor).backward()
        if step == 0:
            gradient = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
            assert relative_error(gradient, result.first_gradient) < 1e-14
        torch.nn.utils.clip_grad_norm_(model.parameters(), RUN["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
    assert relative_error(dict(model.named_parameters()), result.parameters) < 1e-14
    assert len(result.losses) == len(result.grad_norms) == RUN["steps"]


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_a_mean_of_unequal_parts_is_far_from_the_reference(name):
    """What the exactness tests must catch: unweighted means over ranks with 6 and 2 samples."""
    case = CASES[name]
    result = reference_run(name, torch.float32, BATCHES, weighting=case.weighting, **{**RUN, "steps": 1})
    model, dataset = case.model(), case.dataset(32, torch.float32)
    for part in (BATCHES[0][:6], BATCHES[0][6:]):
        (case.loss(model, collate([dataset[i] for i in part])) / 2).backward()
    gradient = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert relative_error(gradient, result.first_gradient) > 0.05


def test_frozen_parameters_stay_and_have_no_gradient():
    frozen = ("transformer.h.0.",)
    before = dict(tiny_gpt2().named_parameters())
    result = reference_run("gpt2", torch.float32, BATCHES, weighting="tokens", frozen=frozen, **RUN)
    for name, parameter in before.items():
        is_frozen = name.startswith(frozen)
        assert (name not in result.first_gradient) == is_frozen
        assert torch.equal(result.parameters[name], parameter) == is_frozen


def test_clipping_by_value_changes_the_run():
    runs = [
        reference_run("vit", torch.float32, BATCHES, weighting="sample", clip_value=clip, **RUN)
        for clip in (None, 1e-6)
    ]
    assert runs[0].grad_norms[0] == runs[1].grad_norms[0]
    assert relative_error(runs[1].parameters, runs[0].parameters) > 1e-4


def test_reference_refuses_a_weighting_that_is_not_exact():
    with pytest.raises(ValueError, match="exact under 'tokens' weighting, not 'sample'"):
        reference_run("gpt2", torch.float32, BATCHES, weighting="sample", **RUN)


def test_relative_error():
    expected = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert relative_error({"a": torch.tensor([3.0]), "b": torch.tensor([4.5])}, expected) == pytest.approx(0.1)
    for wrong, message in [
        ({"a": torch.tensor([3.0])}, r"missing \['b'\]"),
        ({**expected, "c": torch.ones(1)}, r"surplus \['c'\]"),
        ({"a": torch.tensor([3.0]), "b": torch.tensor([float("nan")])}, "not finite"),
        ({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}, "shape"),
    ]:
        with pytest.raises(AssertionError, match=message):
            relative_error(wrong, expected)
    with pytest.raises(AssertionError, match="all zero"):
        relative_error({"a": torch.zeros(1)}, {"a": torch.zeros(1)})
