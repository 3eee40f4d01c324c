# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Models and blocks that return their tensors in objects of their own, which torch does not look into."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import full
from torch import nn
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

    def forward(self, x: torch.Tensor) -> Any:
        found = x + self.second(torch.tanh(self.first(x)))
        match self.wraps:
            case "namespace":
                return SimpleNamespace(hidden=found)
            case "attribute":
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


def message_of_attribute(strategy: str, root: str | None, units: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        train("", "attribute", strategy, "auto", root, units)
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "root", "units"), [("fsdp", None, ["Block"]), ("osdp", "world", ["replicate", "world", "world_kept"])]
)
def test_sharded_blocks_that_leave_their_output_in_an_attribute_are_refused(workers, strategy, root, units):
    for message in workers(2).run(message_of_attribute, strategy, root, units, nodes=(1, 1)):
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
