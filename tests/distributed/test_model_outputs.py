# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Models and blocks that return their tensors in objects of their own, which torch does not look into."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import full
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from training_cases import collate, relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


class Answer:
    """A container that is no mapping, sequence, dataclass or node of a pytree."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.sin(torch.arange(4, dtype=torch.float64) + index)}


class Block(nn.Module):
    """Returns an object of its own where told to, or leaves its output in an attribute."""

    def __init__(self, wraps: str) -> None:
        super().__init__()
        self.wraps = wraps
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.LayerNorm(4) if wraps == "attribute after a norm" else nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        found = self.last(x + self.second(torch.tanh(self.first(x))))
        match self.wraps:
            case "namespace":
                return SimpleNamespace(hidden=found)
            case "attribute" | "attribute after a norm":
                self.hidden = found
                return self
            case _:
                return found


class Model(nn.Module):
    """Gives its output in a container."""

    def __init__(self, container: str, blocks_wrap: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.container = container
        self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList([Block(blocks_wrap) for _ in range(3)])

    def forward(self, inputs: torch.Tensor) -> Any:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
            x = x.hidden if block.wraps else x
        return self.wrapped(self.head(x))

    def wrapped(self, found: torch.Tensor) -> Any:
        match self.container:
            case "namespace":
                return SimpleNamespace(heads=[{"logits": found}])
            case "slots":
                return Answer(3, SimpleNamespace(logits=found))
            case "attribute":
                self.last = found
                return None
            case _:
                return found

    def logits(self, output: Any) -> torch.Tensor:
        match self.container:
            case "namespace":
                return output.heads[0]["logits"]
            case "slots":
                return output.parts[1].logits
            case "attribute":
                return self.last
            case _:
                return output


def steps(model: nn.Module, inside: Model, optimizer: torch.optim.Optimizer, batches: Any, backward: Any) -> None:
    for batch in batches:
        backward(inside.logits(model(batch["inputs"])).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train(container: str, blocks_wrap: str, strategy: str, intra_node: str, root: str | None, units: Any) -> dict:
    placement = None
    if root is not None:
        blocks = {f"blocks.{i}": UnitPlacement(UnitStore(store)) for i, store in enumerate(units)}
        placement = ModelPlacement({"": UnitPlacement(UnitStore(root)), **blocks}, UnitPlacement(UnitStore.REPLICATE))
    plan = Plan.from_batch_sizes([4, 2], strategy=strategy, intra_node=intra_node, placement=placement)
    accelerator = LSHDPAccelerator(
        plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample", units=None if root is not None else units)
    )
    model = Model(container, blocks_wrap).double()
    prepared, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(Points(), 2, collate_fn=collate)
    )
    steps(prepared, model, optimizer, loader, accelerator.backward)
    return {name: full(p) for name, p in prepared.named_parameters()}


def reference() -> dict:
    model = Model("", "").double()
    batches = [collate([Points()[index] for index in range(start, start + 6)]) for start in (0, 6)]
    steps(model, model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches, lambda loss: loss.backward())
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("container", ["namespace", "slots", "attribute"])
@pytest.mark.parametrize(
    ("strategy", "nodes", "intra_node", "root", "units"),
    [
        ("ddp", (1, 1), "auto", None, ["Block"]),
        ("lsdp", (2,), "auto", None, ["Block"]),
        ("lsdp", (2,), "collectives", None, []),
        ("lsdp", (2,), "collectives", None, ["Block"]),
        ("group_sharding", (2,), "auto", None, []),
        ("zero2", (1, 1), "auto", None, []),
        ("fsdp", (1, 1), "auto", None, []),
        ("fsdp", (1, 1), "auto", None, ["Block"]),
        ("osdp", (1, 1), "auto", "world", ["replicate"] * 3),
        ("osdp", (2,), "auto", "world_kept", ["replicate", "node", "replicate"]),
        ("osdp", (1, 1), "auto", "replicate", ["replicate", "world", "world_kept"]),
    ],
)
def test_containers_that_torch_does_not_know(workers, container, strategy, nodes, intra_node, root, units):
    expected = reference()
    for blocks_wrap in ("", "namespace"):
        for parameters in workers(2).run(
            train, container, blocks_wrap, strategy, intra_node, root, units, nodes=nodes
        ):
            assert relative_error(parameters, expected) <= 1e-12, f"blocks wrap: {blocks_wrap}"


@pytest.mark.parametrize(
    ("strategy", "nodes", "root", "units"),
    [
        ("ddp", (1, 1), None, ["Block"]),
        ("zero2", (1, 1), None, ["Block"]),
        ("lsdp", (2,), None, ["Block"]),
        ("osdp", (1, 1), "world", ["replicate", "world_kept", "world_kept"]),
    ],
)
def test_blocks_that_leave_their_output_in_an_attribute(workers, strategy, nodes, root, units):
    expected = reference()
    for parameters in workers(2).run(train, "attribute", "attribute", strategy, "auto", root, units, nodes=nodes):
        assert relative_error(parameters, expected) <= 1e-12


def message_of_attribute(wraps: str, strategy: str, root: str | None, units: Any) -> tuple[str, list[str]]:
    """The error, and what was said before it."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("accelerate_lshdp.engine.stores.fsdp2.outputs")
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError) as caught:
            train("", wraps, strategy, "auto", root, units)
    finally:
        log.removeHandler(handler)
    return str(caught.value), told


@pytest.mark.parametrize("wraps", ["attribute", "attribute after a norm"])
@pytest.mark.parametrize(
    ("strategy", "root", "units"), [("fsdp", None, ["Block"]), ("osdp", "world", ["replicate", "world", "world_kept"])]
)
def test_sharded_blocks_that_leave_their_output_in_an_attribute_are_refused(workers, wraps, strategy, root, units):
    for message, told in workers(2).run(message_of_attribute, wraps, strategy, root, units, nodes=(1, 1)):
        assert told and all("Block, whose parameters are divided" in text for text in told)
        assert re.search(r"a block whose parameters were not gathered again.*in an attribute.*Return what", message)


def train_accumulating(strategy: str, root: str | None, store: str) -> dict:
    placement = None
    if root is not None:
        blocks = {f"blocks.{i}": UnitPlacement(UnitStore(store), checkpoint=i > 0) for i in range(3)}
        placement = ModelPlacement({"": UnitPlacement(UnitStore(root)), **blocks}, UnitPlacement(UnitStore.REPLICATE))
    plan = Plan.from_batch_sizes([(2, 2), (1, 2)], strategy=strategy, placement=placement)
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model = Model("slots", "namespace").double()
    prepared, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(Points(), 2, collate_fn=collate)
    )
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(model.logits(prepared(batch["inputs"])).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(p) for name, p in prepared.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "root", "store"),
    [("fsdp", None, ""), ("osdp", "world", "replicate"), ("osdp", "world", "world"), ("osdp", "node", "world_kept")],
)
def test_micro_batches_and_recomputed_blocks(workers, strategy, root, store):
    expected = reference()
    for parameters in workers(2).run(train_accumulating, strategy, root, store, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12


def two_losses_of_a_forward(container: str, wraps: str) -> dict:
    accelerator, model, prepared, _, loader = started(container, wraps)
    batch = next(iter(loader))
    logits = model.logits(prepared(batch["inputs"]))
    accelerator.backward(logits.square().mean(), retain_graph=True)
    accelerator.backward(logits.square().mean())
    return {name: full(p.grad) for name, p in prepared.named_parameters()}


def started(container: str, wraps: str) -> tuple:
    plan = Plan.from_batch_sizes([4, 2], strategy="fsdp")
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample", units=["Block"]))
    model = Model(container, wraps).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, model, *accelerator.prepare(model, optimizer, DataLoader(Points(), 2, collate_fn=collate))


@pytest.mark.parametrize(("container", "wraps"), [("", ""), ("slots", "namespace")])
def test_two_losses_of_one_forward(workers, container, wraps):
    model = Model("", "").double()
    (2 * model(collate([Points()[index] for index in range(6)])["inputs"]).square().mean()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for gradients in workers(2).run(two_losses_of_a_forward, container, wraps, nodes=(1, 1)):
        assert relative_error(gradients, expected) <= 1e-12


class Recomputing(Model):
    """Recomputes its blocks with reentrant checkpoints, each of which has a backward of its own inside another."""

    def forward(self, inputs: torch.Tensor) -> Any:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.wrapped(self.head(x))


def train_recomputing(container: str) -> dict:
    plan = Plan.from_batch_sizes([4, 2], strategy="fsdp")
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample", units=["Block"]))
    model = Recomputing(container, "").double()
    prepared, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(Points(), 2, collate_fn=collate)
    )
    steps(prepared, model, optimizer, loader, accelerator.backward)
    return {name: full(p) for name, p in prepared.named_parameters()}


@pytest.mark.parametrize("container", ["", "namespace", "attribute"])
def test_reentrant_checkpoints(workers, container):
    expected = reference()
    for parameters in workers(2).run(train_recomputing, container, nodes=(1, 1)):
        assert relative_error(parameters, expected) <= 1e-12


class Weights:
    """What a model returns whose loss is computed with the head's weight, as fused losses are."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self.hidden, self.weight = hidden, weight


def hooks_of_a_returned_weight() -> list[int]:
    accelerator, model, prepared, optimizer, loader = started("", "")
    model.wrapped = lambda found: Weights(found, model.embedding.weight)
    found = []
    for batch in loader:
        output = prepared(batch["inputs"])
        found.append(len(output.weight._backward_hooks or ()))
        accelerator.backward(output.hidden.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_parameters_that_are_returned_keep_no_hooks(workers):
    assert workers(2).run(hooks_of_a_returned_weight, nodes=(1, 1)) == [[0, 0]] * 2


def left_out_model() -> tuple[list[str], dict]:
    """A step of two models, whose second one is not in the loss of rank 1."""
    plan = Plan.from_batch_sizes([4, 2], strategy="lsdp", intra_node="collectives")
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample", units=["Block"]))
    models = [Model("slots", "").double(), Model("slots", "").double()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    loader = DataLoader(Points(), 2, collate_fn=collate)
    *prepared, _, _, loader = accelerator.prepare(*models, *optimizers, loader)
    completed = []
    for name, model in zip(("first", "second"), models, strict=True):
        state = model._get_fsdp_state()
        complete = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = lambda name=name, complete=complete: (
            completed.append(name),
            complete(),
        )
    used = models[: 2 - accelerator.process_index]
    batch = next(iter(loader))
    accelerator.backward(sum(model.logits(model(batch["inputs"])).square().mean() for model in used))
    return completed, {name: full(p.grad) for name, p in prepared[1].named_parameters()}


def test_a_model_that_only_other_ranks_have_in_their_loss_is_not_completed_here(workers):
    """Its sums between nodes begin in the order in which those of the other ranks do."""
    model = Model("", "").double()
    inputs = collate([Points()[index] for index in range(6)])["inputs"]
    (model(inputs[:4]).square().mean() * 4 / 6).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    results = workers(2).run(left_out_model, nodes=(1, 1))
    assert [completed for completed, _ in results] == [["first", "second"], ["first"]]
    for _, gradients in results:
        assert relative_error(gradients, expected) <= 1e-12
