# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""bf16 of models with whole and sharded units: each unit computes as where all are kept so, and training is that of
one process in bf16.
"""

from __future__ import annotations

import math

import pytest
import torch
from exactness import full
from torch import nn
from torch.utils.data import DataLoader
from training_cases import CASES, collate, make_optimizer, tiny_vit

from accelerate_lshdp import LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


REPLICATE, NODE = UnitPlacement(UnitStore.REPLICATE), UnitPlacement(UnitStore.NODE)
WORLD, AGAIN = UnitPlacement(UnitStore.WORLD), UnitPlacement(UnitStore.WORLD, checkpoint=True)
#: By the store of what is in no unit: whole, a node's copy, or sharded.
PLACEMENTS = {
    "whole": ModelPlacement({"": REPLICATE, "vit.embeddings": WORLD, "vit.layers.0": NODE}, AGAIN),
    "node": ModelPlacement({"": NODE, "vit.embeddings": REPLICATE, "vit.layers.0": WORLD}, NODE),
    "world": ModelPlacement({"": WORLD, "vit.embeddings": REPLICATE, "vit.layers.0": WORLD}, NODE),
}


def train(plan: Plan, precision: str) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, bool]], str]:
    """Trains five steps.

    Returns:
        The parameters; by name of a layer, in which precision its weights were and whether autocast was on; and the
        precision of the model's output.
    """
    case = CASES["vit"]
    accelerator = LSHDPAccelerator(plan=plan, mixed_precision=precision)
    model = case.model()
    optimizer = make_optimizer(model, 1e-3, 0.0)
    loader = DataLoader(case.dataset(5 * plan.total_batch_size, torch.float32), batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    computed: dict[str, tuple[str, bool]] = {}

    def note(name: str):  # noqa: ANN202 - a closure for torch
        return lambda module, args: computed.update(
            {name: (str(module.weight.dtype), torch.is_autocast_enabled("cpu"))}
        )

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note(name))
    model.train()
    for batch in loader:
        logits = model(pixel_values=batch["pixel_values"]).logits
        accelerator.backward(nn.functional.cross_entropy(logits, batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}, computed, str(logits.dtype)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


@pytest.mark.parametrize("rest", PLACEMENTS)
def test_units_compute_in_bf16_each_as_its_store_does(workers, rest):
    placement = PLACEMENTS[rest]
    plan = Plan.from_batch_sizes([3, 1, 2, 2], strategy="osdp", placement=placement)
    results = workers(4).run(train, plan, "bf16", nodes=(2, 2))
    alone, _, _ = workers(1).run(train, Plan.from_batch_sizes([8], strategy="ddp"), "bf16", nodes=(1,))[0]
    exact, _, _ = workers(1).run(train, Plan.from_batch_sizes([8], strategy="ddp"), "no", nodes=(1,))[0]
    parameters, computed, output = results[0]
    assert all(torch.equal(parameters[name], other[name]) for other, _, _ in results for name in parameters)
    assert output == "torch.float32"
    for name, found in computed.items():
        unit = next((unit for unit in ("vit.embeddings", "vit.layers.0", "vit.layers.1") if name.startswith(unit)), "")
        sharded = placement.of(unit).store is UnitStore.WORLD
        assert found == (("torch.bfloat16", False) if sharded else ("torch.float32", True)), name
    # As far from one process in bf16 as that is from one in fp32, and both near beside what training has moved.
    moved = distance(exact, {name: parameter.detach() for name, parameter in tiny_vit().named_parameters()})
    assert 0 < distance(alone, exact) < 0.3 * moved
    assert 0 < distance(parameters, alone) < 0.3 * moved
