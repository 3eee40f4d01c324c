# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The sizes of units are parts of those of the model: they sum to what a real forward keeps and computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.documents.unit_sizes import MeasuredHead, ModelUnits, SliceableWeights
from accelerate_lshdp.engine.unit_measurement import measure_units
from accelerate_lshdp.estimation.model_measurement import measure_config
from accelerate_lshdp.planning.cost.memory import STATE_BYTES, StateBytes
from accelerate_lshdp.planning.placement.inputs import ModelSizes


HIDDEN, TOKENS, PATCHES = 32, 16, 17


def gpt2(layers: int) -> GPT2Config:
    # Dropout keeps attention apart: a mask is made outside of the blocks, for all of them.
    return GPT2Config(n_embd=HIDDEN, n_layer=layers, n_head=2, vocab_size=50, n_positions=TOKENS)


def bert(layers: int) -> BertConfig:
    return BertConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        max_position_embeddings=TOKENS,
    )


def vit(layers: int) -> ViTConfig:
    return ViTConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )


def text(samples: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(samples, TOKENS, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def images(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(samples, 3, 16, 16), "labels": torch.zeros(samples, dtype=torch.long)}


CASES = {
    "gpt2": (gpt2, GPT2LMHeadModel, text, TOKENS),
    "bert": (bert, BertForMaskedLM, text, TOKENS),
    "vit": (vit, ViTForImageClassification, images, PATCHES),
}


def kept_by_a_forward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """The bytes that a real forward keeps, by the addresses of real memory."""
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *inputs.values()]}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**inputs).loss
    total = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in known)
    assert loss.requires_grad
    return total


@pytest.mark.parametrize("name", CASES)
def test_units_sum_to_the_model_and_a_block_is_what_one_more_layer_adds(name: str) -> None:
    make, kind, batch, positions = CASES[name]
    three, four = measure_config(make(3)).units, measure_config(make(4)).units
    model = kind(make(3)).train()
    assert three.activation_bytes == kept_by_a_forward(model, batch(2)) - kept_by_a_forward(model, batch(1))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(**batch(1))
    # Where attention is one kernel torch counts it on GPUs only; with dropout in attention it is not.
    assert three.flops == pytest.approx(counter.get_total_flops(), rel=0.2)
    assert measure_config(make(3)).flops == pytest.approx(3 * three.flops, rel=0.1)
    parameters = sum(unit.parameters for unit in (*three.units, three.root))
    assert parameters == sum(parameter.numel() for parameter in model.parameters())

    block = three.units[-2]
    assert block.parameters == sum(p.numel() for p in model.get_submodule(block.name).parameters())
    assert four.activation_bytes - three.activation_bytes == block.activation_bytes > 0
    assert four.flops - three.flops == block.flops > 0
    assert four.root == three.root and four.units[-2].flops == block.flops
    # Recomputed, a block keeps what it is given: one activation, and the first one for all a mask, if there is one.
    assert block.input_bytes == 4 * HIDDEN * positions
    assert three.units[-3].input_bytes >= block.input_bytes
    sizes = ModelSizes.of(three)
    assert sizes.flops == three.flops and sizes.units[-2].name == block.name and sizes.root.name == ""


class Tied(nn.Module):
    """Two blocks that share their weight, a frozen one, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.blocks[2].requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:3]:
            values = block(values)
        return self.head(values)


def measured_by_hand(dtype: torch.dtype = torch.float32) -> ModelUnits:
    model = Tied().to(dtype)
    batches = [torch.ones(samples, 4, dtype=dtype) for samples in (1, 3)]
    return measure_units(model, batches, (1, 3), lambda model, batch: model(batch).sum())[0]


def test_tied_frozen_and_unused_blocks() -> None:
    units = measured_by_hand()
    tied, frozen, unused = units.units
    assert tied.modules == ("blocks.0", "blocks.1")
    assert (tied.parameters, tied.trainable) == (16 + 4 + 4, 24)
    assert (frozen.parameters, frozen.trainable) == (20, 0)
    assert (unused.parameters, unused.activation_bytes, unused.input_bytes, unused.flops) == (20, 0, 0, 0)
    # The input of the model is not kept by it. A ReLU keeps its output, 16 bytes, which the next block is given.
    assert tied.activation_bytes == 32 and tied.input_bytes == 16
    assert frozen.activation_bytes == 16 and frozen.input_bytes == 16
    assert tied.flops == 2 * frozen.flops == 2 * 2 * 16
    assert units.root.modules == ("",) and units.root.parameters == 5
    assert [unit.largest_parameter for unit in (*units.units, units.root)] == [16, 0, 16, 4]
    assert ModelUnits.read(units.to_dict()) == units


def test_states_have_the_type_of_the_parameters() -> None:
    single, double = ModelSizes.of(measured_by_hand()), ModelSizes.of(measured_by_hand(torch.float64))
    assert single.state_bytes == StateBytes() and double.state_bytes == StateBytes(8, 8, 16, 8, 8)
    assert double.units[0].activation_bytes == 2 * single.units[0].activation_bytes
    # In half precision the parameters that are kept stay as they are.
    half = measure_config(vit(1), mixed_precision="bf16").units
    assert ModelSizes.of(half).state_bytes == STATE_BYTES["bf16"]


def test_a_placement_names_all_modules_of_a_unit() -> None:
    units = measured_by_hand()
    kept = UnitPlacement(store=UnitStore.WORLD_KEPT)
    recomputed = UnitPlacement(store=UnitStore.WORLD, checkpoint=True)
    planned = ModelPlacement(units={"blocks.0": recomputed, "blocks.2": kept, "": kept}, memory_limit_bytes=(5,))
    written = units.with_all_modules(planned)
    assert dict(written.units) == {"blocks.0": recomputed, "blocks.1": recomputed, "blocks.2": kept, "": kept}
    # What is not named, such as a block that is added later, is kept like most and not recomputed.
    assert written.default == kept or written.default.store is UnitStore.WORLD
    assert not written.default.checkpoint and written.memory_limit_bytes == (5,)


@pytest.mark.parametrize("change", [{"modules": []}, {"trainable": 25}, {"flops": -1}, {"modules": ["", "blocks.2"]}])
def test_impossible_sizes_are_refused(change: dict[str, Any]) -> None:
    document = measured_by_hand().to_dict()
    document["units"][0] |= change
    with pytest.raises(ValueError, match="units|root|module"):
        ModelUnits.read(document)


def test_a_measurement_leaves_no_hooks_behind() -> None:
    model = Tied()
    with pytest.raises(RuntimeError):
        measure_units(model, [torch.ones(1, 5)] * 2, (1, 2), lambda model, batch: model(batch).sum())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Tagger(nn.Module):
    """A tied embedding and head; a block whose weights are used as layers use them, and one where they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 512), "down": nn.Linear(512, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        first, second = self.layers
        hidden = first["down"](first["up"](hidden).relu())
        up = torch.einsum("bc,rc->br", hidden, second["up"].weight.to(hidden.dtype))
        return self.head(second["down"](up))


def test_weights_that_operators_take_in_slices() -> None:
    batches = [torch.zeros(samples, dtype=torch.long) for samples in (1, 2)]
    units, _ = measure_units(
        Tagger(), batches, (1, 2), lambda model, batch: model(batch).sum(), block_names=["layers.0", "layers.1"]
    )
    first, second = units.units
    # "down" has too few rows: it is gathered whole.
    assert first.sliceable == SliceableWeights(parameters=2048, forward=2048, backward=2048, uses=1)
    # One that would be in slices is used by an operator that cannot take it so.
    assert second.sliceable is None
    assert units.root.sliceable == SliceableWeights(parameters=1200, forward=2400, backward=1200, uses=2)
    assert ModelUnits.read(units.to_dict()) == units
    assert [ModelSizes.of(units).units[0].sliceable, ModelSizes.of(units).root.sliceable] == [
        first.sliceable,
        units.root.sliceable,
    ]


class Speaker(nn.Module):
    """A block and a head with its loss.

    Args:
        reads: whether the model needs its logits, too.
    """

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))])
        self.head = nn.Linear(8, 300)
        self.reads = reads

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, labels = batch
        logits = self.head(self.layers[0](hidden))
        loss = nn.functional.cross_entropy(logits.view(-1, 300), labels)
        return (loss + logits.mean() if self.reads else loss), logits


def speak(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(samples, 8), torch.zeros(samples, dtype=torch.long)


def test_logits_that_only_the_own_loss_of_a_model_needs() -> None:
    def measured(reads: bool, own: bool = True) -> ModelUnits:
        def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            loss, logits = model(batch)
            return loss if own else nn.functional.cross_entropy(logits, batch[1])

        return measure_units(Speaker(reads), [speak(1), speak(3)], (1, 3), loss_of)[0]

    units = measured(reads=False)
    # The loss keeps 300 numbers in fp32. Their gradient, and the one that it is computed from, are 4 times as large as
    # those of the block's 64.
    assert units.root.sliceable.logits_bytes == 1200
    assert units.root.sliceable.loss_bytes == 1200 + 2 * (1200 - 256)
    assert ModelUnits.read(units.to_dict()) == units
    sizes = ModelSizes.of(units)
    assert sizes.working_bytes == 2 * 256
    total = sum(unit.activation_bytes for unit in sizes.everything) + sizes.working_bytes
    assert total == units.activation_bytes + units.working_bytes
    for others in (measured(reads=True), measured(reads=False, own=False)):
        assert others.root.sliceable.logits_bytes is None and others.root.sliceable.loss_bytes is None


class Watched(nn.Module):
    """An embedding, two blocks, and a head whose output is kept by its loss alone; returns a hidden state, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2))
        self.start, self.head = nn.Linear(8, 8), nn.Linear(8, 300)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        hidden = self.start(batch[0]).tanh()
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, batch[1]), logits=logits, hidden=hidden)


class Twice(Watched):
    """Goes through its blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*self.layers, *self.layers])


def test_what_the_head_of_a_model_keeps_and_returns() -> None:
    def head_of(model: nn.Module) -> MeasuredHead | None:
        loss_of = lambda model, batch: model(batch).loss  # noqa: E731
        units = measure_units(model, [speak(1), speak(3)], (1, 3), loss_of)[0]
        assert ModelUnits.read(units.to_dict()) == units
        return units.head

    found = head_of(Watched())
    # The loss keeps 300 probabilities, the head its input of 8 numbers. The largest before them are the 64 of a block.
    assert found.kept_bytes == 4 * (300 + 8)
    assert [found.working_bytes, found.units_working_bytes] == [2 * 4 * 300, 2 * 4 * 64]
    # The logits are not kept for the backward, what the head multiplies is.
    assert [found.output_bytes, found.own_output_bytes] == [4 * (300 + 8), 4 * 300]
    # Under mixed precision a prepared model returns copies in fp32 of what is in half precision.
    units = measure_units(
        Watched().bfloat16(),
        [(batch[0].bfloat16(), batch[1]) for batch in (speak(1), speak(3))],
        (1, 3),
        lambda model, batch: model(batch).loss,
        mixed_precision="bf16",
    )[0]
    assert [units.head.output_bytes, units.head.own_output_bytes] == [4 * (300 + 8), 4 * (300 + 8)]

    # Of a unit with several forwards, nothing is known of single moments.
    assert head_of(Twice()) is None
    without = Watched()
    without.layers = nn.ModuleList()
    assert head_of(without) is None
