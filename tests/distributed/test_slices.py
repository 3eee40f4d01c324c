# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Operator splitting: weights in slices train as in one process, and need little memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import Setting, check, full, train
from live_bytes import LiveBytes
from payload_counting import count_one_step, sent_by_nodes
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from training_cases import relative_error

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator, Plan
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore


TOKENS, LENGTH = 23, 5


def sliced(slices: int, checkpoint: bool = False) -> UnitPlacement:
    return UnitPlacement(UnitStore.WORLD, checkpoint, slices)


class Conv1D(nn.Module):
    """As that of transformers: the rows of its weight are input features."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], -1)


class Reading(nn.Module):
    """A first block: its embedding has a padding row and is tied to a head that another module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 12, padding_idx=0)
        self.up = nn.Linear(12, 17)
        self.down = Conv1D(12, 17)
        self.frozen = nn.Linear(12, 12)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return self.norm(hidden + self.frozen(hidden))


class Thinking(nn.Module):
    """A second block: one matrix is used twice, one by another module than its own, one is too small for slices."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(12, 12, bias=False)
        self.lent = nn.Linear(12, 14)
        self.small = nn.Linear(14, 3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(hidden))))
        return self.small(functional.linear(hidden[:, ::2], self.lent.weight, self.lent.bias))


class Reader(nn.Module):
    """Two blocks, and a rest with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Reading(), Thinking()])
        self.head = nn.Linear(3, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens)


class Texts(Dataset):
    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(TOKENS, (size, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


def start(plan: Plan, model: nn.Module, **options: Any) -> tuple:
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Texts(plan.total_batch_size), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def osdp(sizes: list, units: dict[str, UnitPlacement], **options: Any) -> Plan:
    placement = ModelPlacement(units, UnitPlacement(UnitStore.WORLD))
    return Plan.from_batch_sizes(sizes, strategy="osdp", placement=placement, **options)


def expected_gradients(samples: int) -> dict[str, torch.Tensor]:
    """Those of one process in plain torch."""
    model = Reader().double()
    loss_of(model, Texts(samples).tokens).backward()
    return gradients(model)


# Exact


def trained_once(plan: Plan, fails_first: bool = False) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The gradient of one global batch, and the names of the model's state."""
    accelerator, model, optimizer, loader = start(plan, Reader().double())
    model.train()
    for tokens in loader:
        with accelerator.accumulate(model):
            if fails_first and accelerator.sync_gradients:
                raise_in_backward(accelerator, model, tokens)
            accelerator.backward(loss_of(model, tokens))
    return gradients(model), list(model.state_dict())


def raise_in_backward(accelerator: LSHDPAccelerator, model: nn.Module, tokens: torch.Tensor) -> None:
    """A backward that ends in the middle, on all ranks alike."""

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("in the middle")

    def watch(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = model.blocks[0].norm.register_forward_hook(watch)
    loss = loss_of(model, tokens)
    handle.remove()
    with pytest.raises(KeyError):
        accelerator.backward(loss)
    model.zero_grad()  # of what came before the failure


MIXTURES = [
    ({"blocks.0": sliced(2), "blocks.1": sliced(3)}, [3, 1, 2, 2], (2, 2)),
    (
        {"blocks.0": sliced(3, checkpoint=True), "blocks.1": sliced(2, checkpoint=True)},
        [(2, 2), (1, 2), (3, 2)],
        (1, 2),
    ),
    (
        {"": sliced(3), "blocks.0": sliced(4), "blocks.1": UnitPlacement(UnitStore.REPLICATE)},
        [2, 1, 1, 3],
        (1, 1, 1, 1),
    ),
]


@pytest.mark.parametrize(("units", "sizes", "nodes"), MIXTURES)
def test_the_gradient_is_that_of_one_process(workers, units, sizes, nodes):
    plan = osdp(sizes, units)
    expected = expected_gradients(plan.total_batch_size)
    for found, names in workers(len(sizes)).run(trained_once, plan, nodes=nodes):
        assert relative_error(found, expected) <= 1e-12
        assert names == list(Reader().state_dict())


def test_a_backward_that_fails_leaves_nothing_behind(workers):
    plan = osdp([3, 1, 2, 2], {"blocks.0": sliced(2), "blocks.1": sliced(3)})
    expected = expected_gradients(plan.total_batch_size)
    for found, _ in workers(4).run(trained_once, plan, True, nodes=(2, 2)):
        assert relative_error(found, expected) <= 1e-12


def trained_in_parts(plan: Plan) -> list[dict[str, torch.Tensor]]:
    """Gradients of two forwards before one backward, and of a step of which one half is under ``no_sync``."""
    accelerator, model, _, loader = start(plan, Reader().double())
    model.train()
    found = []
    for tokens in loader:
        accelerator.backward(0.25 * loss_of(model, tokens) + 0.75 * loss_of(model, tokens))
        found.append(gradients(model))
        model.zero_grad()
        with accelerator.no_sync(model):
            accelerator.backward(0.5 * loss_of(model, tokens))
        assert not any("words" in name or "shared" in name for name in gradients(model))
        accelerator.backward(0.5 * loss_of(model, tokens))
        found.append(gradients(model))
        # A gradient of activations alone is not one of the weights.
        inside: list[torch.Tensor] = []
        handle = model.blocks[0].register_forward_hook(lambda module, args, output, kept=inside: kept.append(output))
        model.zero_grad()
        loss = loss_of(model, tokens)
        handle.remove()
        torch.autograd.grad(loss, inside)
        accelerator.backward(loss_of(model, tokens))
        found.append(gradients(model))
        # What one rank holds alone is dropped with the rest.
        model.zero_grad()
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, tokens))
        model.zero_grad()
        accelerator.backward(0.5 * loss_of(model, tokens))
        accelerator.backward(0.5 * loss_of(model, tokens))
        found.append(gradients(model))
    return found


def test_forwards_and_backwards_may_come_in_several_parts(workers):
    plan = osdp([3, 1, 2, 2], {"blocks.0": sliced(2), "blocks.1": sliced(3)})
    expected = expected_gradients(plan.total_batch_size)
    for parts in workers(4).run(trained_in_parts, plan, nodes=(2, 2)):
        for found in parts:
            assert relative_error(found, expected) <= 1e-12


def evaluated(plan: Plan, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs with weights that were loaded, and the state after a forward that was interrupted."""
    accelerator, model, _, _ = start(plan, Reader().double())
    model.load_state_dict(state)

    def interrupt(module: nn.Module, args: tuple) -> None:
        raise KeyboardInterrupt

    model.eval()
    with torch.no_grad():
        outputs = model(Texts(4).tokens)
        handle = model.blocks[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(Texts(4).tokens)
        handle.remove()
    return outputs, accelerator.get_state_dict(model)


def test_weights_are_loaded_evaluated_and_saved_under_their_own_names(workers):
    plan = osdp([1] * 3, {"": sliced(2), "blocks.0": sliced(2), "blocks.1": sliced(3)})
    model = Reader().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for outputs, state in workers(3).run(evaluated, plan, model.state_dict(), nodes=(1, 2)):
        torch.testing.assert_close(outputs, model(Texts(4).tokens), rtol=1e-12, atol=1e-12)
        assert not state or all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert not state or list(state) == list(model.state_dict())


def trained_in_bf16(plan: Plan) -> dict[str, torch.Tensor]:
    accelerator, model, _, loader = start(plan, Reader(), mixed_precision="bf16")
    model.train()
    for tokens in loader:
        accelerator.backward(loss_of(model, tokens))
    return gradients(model)


def test_low_precision_is_that_of_whole_units(workers):
    whole, parts = ({name: sliced(k) for name in ("", "blocks.0", "blocks.1")} for k in (1, 2))
    pool = workers(4)
    expected, found = (pool.run(trained_in_bf16, osdp([3, 1, 2, 2], each), nodes=(2, 2)) for each in (whole, parts))
    for one, other in zip(expected, found, strict=True):
        assert all(gradient.dtype == torch.float32 for gradient in other.values())
        assert relative_error(other, one) <= 2e-2


def without_a_sample() -> list[Setting]:
    """A last batch that leaves ranks empty, whose loss is replaced by zeros."""
    layers = {f"vit.layers.{layer}": sliced(2 + layer, checkpoint=layer == 1) for layer in range(2)}
    blocks = {"": sliced(2), **{f"transformer.h.{layer}": sliced(2 + layer) for layer in range(2)}}
    return [
        Setting("osdp", (3, 1, 2, 2), (2, 2), placement=ModelPlacement(layers), short_batch=1, frozen=("layers.1",)),
        Setting(
            "osdp",
            ((2, 2), (1, 2), (2, 2)),
            (1, 2),
            model="gpt2",
            dtype="float32",
            placement=ModelPlacement(blocks),
            own_accumulation=2,
            short_batch=1,
            steps=4,
            optimizer=(("fused", True),),
        ),
    ]


@pytest.mark.parametrize("setting", without_a_sample(), ids=["vit", "gpt2"])
def test_training_equals_one_process(workers, setting):
    check(workers(setting.world_size).run(train, setting, nodes=setting.nodes, timeout=90), setting.dtype)


# Memory


class Large(nn.Module):
    """One layer with a large matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(256, 2048))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def peaks(slices: int) -> tuple[int, int]:
    """Peaks of forward and backward of a layer."""
    plan = osdp([1] * 4, {"layers.0": sliced(slices)})
    accelerator = LSHDPAccelerator(plan=plan, lsdp_plugin=LSDPPlugin(loss_weighting="sample"))
    model = accelerator.prepare(Large())
    model.train()
    x = torch.ones(1, 256, requires_grad=True)
    accelerator.backward(model(x).mean())  # sets up what stays
    model.zero_grad()
    with LiveBytes(model) as forward:
        loss = model(x).mean()
    with LiveBytes(model) as backward:
        accelerator.backward(loss)
    return forward.most, backward.most


@pytest.mark.parametrize("slices", [2, 4])
def test_slices_divide_the_peak_of_a_layer(workers, slices):
    pool = workers(4)
    whole, parts = (pool.run(peaks, each, nodes=(2, 2)) for each in (1, slices))
    layer = 256 * 2048 * 4
    for (forward, backward), (forward_, backward_) in zip(whole, parts, strict=True):
        assert forward > layer and backward > 2 * layer  # what is to be divided is seen
        assert forward_ <= (1 / slices + 0.1) * forward
        # Beside the gradient that stays, of this rank's rows.
        assert backward_ - layer / 4 <= (1 / slices + 0.1) * (backward - layer / 4)


# Bytes


@pytest.mark.parametrize(("checkpoint", "micro_batches", "gathers", "sums"), [(False, 1, 2, 1), (True, 2, 6, 2)])
def test_the_bytes_between_nodes_are_those_of_the_formula(workers, checkpoint, micro_batches, gathers, sums):
    """Gathered in the forward and in the backward, for recomputing too, and summed in every micro-batch."""
    units = {f"vit.layers.{layer}": sliced(2, checkpoint) for layer in range(3)}
    placement = ModelPlacement(units, UnitPlacement(UnitStore.WORLD_KEPT))
    counted = workers(4).run(count_one_step, "osdp", micro_batches, "fp32", 1, (2, 2), "auto", placement, nodes=(2, 2))
    total, own = counted[0]["total"], sum(counted[0]["units"][name] for name in units)
    formula = (gathers + sums) / 2 * own + (total - own)
    assert sent_by_nodes(counted, (2, 2)) == pytest.approx([formula] * 2, rel=0.02)


# Refusals


class Wrong(nn.Module):
    """Uses a weight otherwise than slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 16), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * self.blocks[0][0].weight.norm()


class Experts(nn.Module):
    """A block of which each rank uses another expert, or the first rank one and the others none."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 0:
            return self.first(x)
        return x + self.second.bias if self.skips else self.second(x)


def refused(plan: Plan, model: Callable[[], nn.Module], second_order: bool = False) -> str:
    accelerator = LSHDPAccelerator(plan=plan)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        prepared = accelerator.prepare(model())
        prepared.train()
        output = prepared(torch.ones(2, 12)).mean()
        if second_order:
            accelerator.backward(output, create_graph=True)
    return str(caught.value)


def simple() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(12, 16, bias=False)), nn.ReLU())


def others() -> nn.Module:
    return nn.Sequential(Experts(skips=False), nn.ReLU())


def fewer() -> nn.Module:
    return nn.Sequential(Experts(skips=True), nn.LayerNorm(12))


REFUSED = [
    (Wrong, {"blocks.0": sliced(2)}, False, "found blocks.0.0.weight, which is in slices, in norm"),
    (fewer, {"0": sliced(2)}, False, "rank 0: forward of 0.first.weight; rank 1: gathers a unit, 24 elements"),
    (others, {"0": sliced(2)}, False, "rank 0: forward of 0.first.weight; rank 1: forward of 0.second.weight"),
    (simple, {"0": sliced(12)}, False, "a Linear, Embedding or Conv1D with at least 24 rows"),
    (simple, {"0": sliced(2)}, True, "found gradients of gradients"),
]


@pytest.mark.parametrize(
    ("model", "units", "second_order", "message"), REFUSED, ids=["norm", "fewer", "others", "small", "graph"]
)
def test_what_cannot_be_is_refused_on_all_ranks(workers, model, units, second_order, message):
    for said in workers(2).run(refused, osdp([1, 1], units), model, second_order, nodes=(1, 1), timeout=60):
        assert message in said, said
