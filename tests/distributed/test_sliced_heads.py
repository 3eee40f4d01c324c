# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A head in slices computes its loss without its logits, with the gradient of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from live_bytes import LiveBytes
from sliced_head_cases import (
    CLASSES,
    MIXED,
    Speaker,
    Texts,
    Use,
    after_a_metric,
    after_a_metric_in_inference_mode,
    aside,
    by_function,
    by_function_after_changes,
    by_row,
    by_script,
    by_surrogate,
    changed_in_place,
    checkpointed,
    checkpointed_reentrant,
    copied,
    copy_of_one_sample,
    expected,
    gradients,
    hooked,
    in_pieces,
    of_another_shape,
    only_where_labels_are,
    osdp,
    padded,
    reversed_after_a_metric,
    reversed_gradient,
    shifted,
    smoothed,
    start,
    trained_by,
    twice,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training_cases import relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


def trained_once(plan: Plan, use: Use, tied: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The gradient of one global batch, of a loss that nobody says anything about, and the kinds of its logits."""
    plugin = LSDPPlugin(loss_weighting="sample") if use in MIXED else None
    accelerator, model, _, loader = start(plan, Speaker(use, tied).double(), even=use in MIXED, lsdp_plugin=plugin)
    model.train()
    kinds = []
    for batch in loader:
        with accelerator.accumulate(model):
            output = model(**batch)
            kinds.append(type(output["logits"]).__name__)
            accelerator.backward(output["loss"])
    return gradients(model), kinds


USES = [
    *(shifted, padded, by_row, smoothed, after_a_metric, changed_in_place, copied, of_another_shape),
    *(after_a_metric_in_inference_mode, in_pieces, hooked, aside, reversed_after_a_metric, only_where_labels_are),
    *(checkpointed, checkpointed_reentrant, twice, copy_of_one_sample, by_function, by_function_after_changes),
    *(reversed_gradient, by_script, by_surrogate),
]


#: What the model returns as its logits, if not a tensor of torch: nothing has needed them, or not before the loss.
KINDS = {
    **dict.fromkeys((shifted, padded, by_row, by_surrogate, checkpointed, checkpointed_reentrant), "SlicedLogits"),
    **dict.fromkeys((aside, twice), "UsedLogits"),
}


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("use", USES)
def test_the_gradient_is_that_of_one_process(workers, use, tied):
    plan = osdp([3, 2, 2, 2])  # of one sample torch's contiguous makes no copy
    of_one = expected(use, tied, plan.total_batch_size)
    for found, kinds in workers(4).run(trained_once, plan, use, tied, nodes=(2, 2)):
        assert relative_error(found, of_one) <= 1e-12
        assert use is only_where_labels_are or kinds == [KINDS.get(use, "Tensor")] * len(kinds)


@pytest.mark.parametrize("use", [in_pieces, copy_of_one_sample])
def test_one_rank_has_one_sample(workers, use):
    """Where losses are of pieces it makes one; its views may be contiguous."""
    plan = osdp([3, 1, 2, 2])
    of_one = expected(use, False, plan.total_batch_size)
    for found, _ in workers(4).run(trained_once, plan, use, False, nodes=(2, 2)):
        assert relative_error(found, of_one) <= 1e-12


def test_micro_batches_and_uneven_nodes(workers):
    plan = osdp([(2, 2), (1, 2), (3, 2)], slices=2)
    of_one = expected(padded, True, plan.total_batch_size)
    for found, _ in workers(3).run(trained_once, plan, padded, True, nodes=(1, 2)):
        assert relative_error(found, of_one) <= 1e-12


def trained_in_bf16(plan: Plan) -> dict[str, torch.Tensor]:
    accelerator, model, _, loader = start(plan, Speaker(padded), mixed_precision="bf16")
    model.train()
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
    return gradients(model)


def test_low_precision_is_that_of_a_whole_head(workers):
    pool = workers(4)
    whole, parts = (pool.run(trained_in_bf16, osdp([3, 1, 2, 2], slices), nodes=(2, 2)) for slices in (1, 3))
    for one, other in zip(whole, parts, strict=True):
        assert all(gradient.dtype == torch.float32 for gradient in other.values())
        assert relative_error(other, one) <= 2e-2


class Checkpointing(Speaker):
    """Its head and loss are computed again in the backward, and so is a block after a layer that is in slices, too."""

    def __init__(self) -> None:
        super().__init__(shifted)
        self.before = nn.Linear(12, 12)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = checkpoint(self.blocks[0], self.before(self.words(tokens)), use_reentrant=False)
        return {"loss": checkpoint(lambda hidden: self.use(self.head(hidden), labels), hidden, use_reentrant=False)}


class HalfAutocast(Speaker):
    """Its head computes in fp32 although the rest does not."""

    def __init__(self) -> None:
        super().__init__(padded)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.blocks[0](self.words(tokens))
            with torch.autocast("cpu", enabled=False):
                logits = self.head(hidden.float())
            return {"loss": self.use(logits, labels)}


def test_checkpointing_around_a_head(workers):
    plan, texts, model = osdp([3, 1, 2, 2]), Texts(8, even=True), Checkpointing().double()
    model(texts.tokens, texts.labels)["loss"].backward()
    for found in workers(4).run(trained_by, plan, Checkpointing, torch.float64, nodes=(2, 2)):
        assert relative_error(found, gradients(model)) <= 1e-12


def test_a_head_computes_in_the_precision_of_its_call(workers):
    pool = workers(2)
    whole, parts = (
        pool.run(trained_by, osdp([2, 2], slices), HalfAutocast, torch.float32, nodes=(1, 1)) for slices in (1, 3)
    )
    for one, other in zip(whole, parts, strict=True):
        # Of the head alone: the gradient of what comes before it is rounded to bf16.
        assert relative_error({"": other["head.weight"]}, {"": one["head.weight"]}) <= 1e-5


class Projecting(nn.Module):
    """A layer of the root that is no head: what it returns is changed in place and given to a block.

    Args:
        is_frozen: whether its own weight and input need no gradient.
    """

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.project = nn.Linear(12, CLASSES).requires_grad_(not is_frozen)
        self.first = nn.Parameter(torch.randn(CLASSES))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(CLASSES, 12), nn.Tanh())])
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.project(functional.one_hot(tokens % 12, 12).to(self.first.dtype))
        hidden[:, 0] = self.first
        logits = self.head(self.blocks[0](hidden))
        return {"loss": shifted(logits, labels), "logits": logits}


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_a_layer_that_is_no_head(workers, is_frozen):
    plan, texts, model = osdp([3, 1, 2, 2]), Texts(8, even=True), Projecting(is_frozen).double()
    model(texts.tokens, texts.labels)["loss"].backward()
    make = partial(Projecting, is_frozen)
    for found in workers(4).run(trained_by, plan, make, torch.float64, nodes=(2, 2)):
        assert found.keys() == gradients(model).keys()
        assert relative_error(found, gradients(model)) <= 1e-12


class Skipping(Speaker):
    """Ranks with few labels use the embedding only where the others use the head, of the same weight."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if torch.distributed.get_rank() == 0:
            return {"loss": self.words(tokens).square().mean()}
        hidden = torch.ones(1, 12, dtype=self.words.weight.dtype, requires_grad=True)
        return {"loss": self.head(hidden).square().mean()}


def skipped(plan: Plan) -> str:
    accelerator, model, _, loader = start(plan, Skipping(shifted, tied=True).double(), even=True)
    model.train()
    with pytest.raises(RuntimeError) as caught:
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
    return str(caught.value)


def test_rows_and_products_of_one_weight_are_not_mixed_up(workers):
    for said in workers(2).run(skipped, osdp([1, 1]), nodes=(1, 1)):
        assert "found ranks in different operators of a model with slices" in said
        assert "rank 0: forward of rows of words.weight; rank 1: forward of words.weight" in said


class Large(nn.Module):
    """A head with many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16))])
        self.head = nn.Linear(16, 8192)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.blocks[0](x)).float(), labels)


def peaks(slices: int) -> tuple[int, int]:
    """Peaks of forward and backward of a head and its loss."""
    accelerator = LSHDPAccelerator(plan=osdp([1] * 4, slices), lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model = accelerator.prepare(Large())
    model.train()
    x, labels = torch.ones(256, 16), torch.arange(256)
    accelerator.backward(model(x, labels))  # sets up what stays
    model.zero_grad()
    with LiveBytes(model) as forward:
        loss = model(x, labels)
    with LiveBytes(model) as backward:
        accelerator.backward(loss)
    return forward.most, backward.most


def test_a_head_and_its_loss_need_the_memory_of_a_slice(workers):
    pool = workers(4)
    whole, parts = (pool.run(peaks, slices, nodes=(2, 2)) for slices in (1, 8))
    logits = 256 * 8192 * 4
    for most, most_ in zip(whole, parts, strict=True):
        for one, other in zip(most, most_, strict=True):
            assert one > 2 * logits  # what is to be divided is seen
            assert other <= (1 / 8 + 0.1) * one
