# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the losses of loops are means over is found out: each gives the gradient of one process, or an error."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import full
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training_cases import Samples, collate, make_optimizer, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan


TAGS, LENGTH = 7, 6
SAMPLES = 22  # global batches of 4, and one of 2
#: Samples whose labels are all -100.
EMPTY = frozenset({3, 8, 9, 10, 17})
PLACES = [("ddp", (1, 1)), ("collectives", (1, 1)), ("lsdp", (2,)), ("fsdp", (2,))]


def tagged_rows(size: int = SAMPLES) -> Samples:
    """Rows of words, a tag for the first words of each, and -100 for the others."""

    def make(index: int, generator: torch.Generator) -> dict[str, Tensor]:
        words = torch.randint(1, TAGS, (LENGTH,), generator=generator)
        tags = torch.randint(0, TAGS, (LENGTH,), generator=generator)
        count = 0 if index in EMPTY else 1 + int(torch.randint(LENGTH, (), generator=generator))
        labels = torch.where(torch.arange(LENGTH) < count, tags, -100)
        return {"input_ids": torch.where(torch.arange(LENGTH) < count, words, 0), "labels": labels}

    return Samples(size, make)


class Tagger(nn.Module):
    """Computes its loss itself, in its own precision, unlike the models of transformers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(TAGS, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.tags = nn.Linear(8, TAGS)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None
    ) -> SimpleNamespace | dict:
        logits = self.tags(self.hidden(self.words(input_ids)))
        if labels is None:
            return {"logits": logits}
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = tag_loss(logits, labels, self.kind, reduction)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return {"loss": loss, "logits": logits}


def tag_loss(logits: Tensor, labels: Tensor, kind: str, reduction: str = "mean") -> Tensor:
    if kind == "shifted":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction=reduction)


def make_tagger(kind: str) -> Tagger:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Tagger(kind).double()


def loss_of(pattern: str, model: nn.Module, batch: dict) -> Tensor:
    """What a script gives to `backward`."""
    if pattern in ("labels", "shifted"):
        return model(**batch)["loss"]
    if pattern == "a multiple":
        return 0.3 * model(**batch)["loss"]
    if pattern == "own cross entropy":
        return tag_loss(model(batch["input_ids"])["logits"], batch["labels"], "labels")
    if pattern == "own sum":
        return tag_loss(model(batch["input_ids"])["logits"], batch["labels"], "labels", "sum")
    if pattern == "own mean over rows":
        logits = model(batch["input_ids"])["logits"]
        return cross_entropy(logits.mean(dim=1), batch["input_ids"][:, 0])
    if pattern == "labels made in the loop":
        return model(batch["input_ids"], torch.where(batch["input_ids"] == 0, -100, batch["input_ids"]))["loss"]
    raise ValueError(pattern)


def data_of(pattern: str) -> Samples:
    data = tagged_rows()
    if pattern not in ("labels made in the loop", "own mean over rows"):
        return data
    return Samples(len(data), lambda index, generator: {"input_ids": data[index]["input_ids"]})


def placing_of(strategy: str) -> dict:
    return {"strategy": "lsdp", "intra_node": "collectives"} if strategy == "collectives" else {"strategy": strategy}


def one_process(pattern: str, accumulation: int = 1) -> dict:
    kind = "shifted" if pattern == "shifted" else "labels"
    model, data = make_tagger(kind), data_of(pattern)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    batches = [range(start, min(start + 4, SAMPLES)) for start in range(0, SAMPLES, 4)]
    for first in range(0, len(batches), accumulation):
        for batch in batches[first : first + accumulation]:
            (loss_of(pattern, model, collate([data[index] for index in batch])) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def listening():
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("accelerate_lshdp.loss_finding").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("accelerate_lshdp.loss_finding").removeHandler(handler)


def train(pattern: str, strategy: str, sizes: list, accumulation: int = 1, **options: Any) -> tuple[dict, list, dict]:
    plan = Plan.from_batch_sizes(sizes, allow_unequal_accumulation=True, **placing_of(strategy))
    accelerator = LSHDPAccelerator(
        plan=plan, gradient_accumulation_steps=accumulation, lsdp_plugin=LSDPPlugin(**options)
    )
    model = make_tagger("shifted" if pattern == "shifted" else "labels")
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loader = DataLoader(data_of(pattern), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    with listening() as told:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(pattern, model, batch))
                optimizer.step()
                optimizer.zero_grad()
    found = {name: finding["composition"] for name, finding in accelerator.loss_findings["loop"].items()}
    return {name: full(parameter) for name, parameter in model.named_parameters()}, told, found


FOUND = {
    "labels": "LABELS",
    "shifted": "SHIFTED_LABELS",
    "a multiple": "LABELS",
    "own cross entropy": "LABELS",
    "own sum": "SUM",
    "labels made in the loop": "LABELS",
}


@pytest.mark.parametrize("number", range(len(FOUND) * 2))
def test_losses_are_weighted_by_what_they_are_means_over(workers, number):
    pattern = list(FOUND)[number % len(FOUND)]
    strategy, nodes = PLACES[(number + number // len(FOUND)) % len(PLACES)]
    sizes = [3, 1] if number < len(FOUND) or "made" in pattern else [(1, 2), (1, 2)]
    expected = one_process(pattern)
    for parameters, told, found in workers(2).run(train, pattern, strategy, sizes, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12
        # Micro-batches of one row fit means over rows as well, so nothing is settled yet.
        assert found == {"loss 0": FOUND[pattern]} or (not found and sizes == [(1, 2), (1, 2)])
        assert len([text for text in told if "was found to be" in text]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("pattern", FOUND)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_losses_are_weighted_by_what_they_are_means_over_everywhere(workers, pattern, ranks):
    shapes = {1: ((1,),), 2: ((2,), (1, 1)), 3: ((1, 2),), 4: ((2, 2),)}[ranks]
    splits = [{1: [4], 2: [3, 1], 3: [2, 1, 1], 4: [1, 1, 1, 1]}[ranks]]
    if "made" not in pattern:
        splits.append([(1, 4)] if ranks == 1 else [(1, 2), (1, 2)] if ranks == 2 else [])
    expected = one_process(pattern)
    for nodes in shapes:
        for strategy in ("ddp", "lsdp", "collectives", "fsdp"):
            for sizes in filter(None, splits):
                for parameters, _, _ in workers(ranks).run(train, pattern, strategy, sizes, nodes=nodes):
                    assert relative_error(parameters, expected) <= 1e-12, (nodes, strategy, sizes)


@pytest.mark.parametrize("sizes", [[3, 1], [(1, 3), (1, 1)]], ids=["plain", "unequal accumulation"])
def test_accumulated_global_batches_count_as_in_one_process(workers, sizes):
    expected = one_process("labels", 2)
    for parameters, _, _ in workers(2).run(train, "labels", "lsdp", sizes, 2, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12


# Losses that are divided by the labels of all ranks already


def train_by_recipe(strategy: str, steps: int) -> tuple[dict, dict]:
    """As in accelerate's example of accumulation for language models: the script counts, and undoes what divides."""
    plan = Plan.from_batch_sizes([3, 1], **placing_of(strategy))
    accelerator = LSHDPAccelerator(plan=plan, gradient_accumulation_steps=steps)
    model = make_tagger("shifted")
    optimizer = make_optimizer(model, 1e-2, 0.0)
    loader = DataLoader(tagged_rows(16), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    batches = iter(loader)
    for _ in range(4 // steps):
        window = [next(batches) for _ in range(steps)]
        own = sum(batch["labels"].ne(-100).sum() for batch in window)
        items = accelerator.gather(own).sum().item()
        for number, batch in enumerate(window):
            with accelerator.no_sync(model) if number < steps - 1 else contextlib.nullcontext():
                loss = model(**batch, num_items_in_batch=items)["loss"]
                accelerator.backward(loss * steps * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: finding["composition"] for name, finding in accelerator.loss_findings["loop"].items()}
    return {name: full(parameter) for name, parameter in model.named_parameters()}, found


@pytest.mark.parametrize(("strategy", "nodes", "steps"), [("ddp", (1, 1), 1), ("lsdp", (2,), 2), ("fsdp", (2,), 2)])
def test_losses_divided_by_all_labels_are_not_weighted_again(workers, strategy, nodes, steps):
    model, data = make_tagger("shifted"), tagged_rows(16)
    optimizer = make_optimizer(model, 1e-2, 0.0)
    for start in range(0, 16, 4 * steps):
        batch = collate([data[index] for index in range(start, start + 4 * steps)])
        model(**batch, num_items_in_batch=batch["labels"].ne(-100).sum())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameters, found in workers(2).run(train_by_recipe, strategy, steps, nodes=nodes):
        assert found == {"loss 0": "GLOBAL"}
        assert relative_error(parameters, expected) <= 1e-12
