# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measures a model without weights: parameters, units, activations and floating-point operations.

The model is built and trained for one step on fake tensors, which have shapes and no content. Its real code runs, so
the tensors that are kept for the backward are those of a real run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from accelerate_lshdp.engine.units import choose_units
from accelerate_lshdp.estimation.model_sources import model_class_of
from accelerate_lshdp.planning.cost.memory import ModelCounts


if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LONGEST_SEQUENCE = 1024
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MeasuredModel:
    """Sizes and operations of a model.

    Args:
        name: its class, and the kind of one sample.
        counts: numbers of its parameters.
        matrices: (rows, columns) of each trainable parameter; vectors have one column.
        activation_bytes: bytes that are kept for the backward of one sample.
        transient_bytes: bytes of the largest of these tensors for one sample, twice: its gradient, and the one that
            this is computed from, exist beside it for a moment.
        flops: operations of forward and backward of one sample; a multiplication and an addition are two.
    """

    name: str
    counts: ModelCounts
    matrices: tuple[tuple[int, int], ...]
    activation_bytes: float
    transient_bytes: float
    flops: float

    def activations(self, samples: int) -> float:
        """Bytes of activations of a micro-batch of `samples` samples, with the largest gradient of an activation."""
        return samples * (self.activation_bytes + self.transient_bytes)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a forward keeps for the backward, without parameters, buffers and inputs.

    Args:
        total: bytes of all kept tensors.
        largest: bytes of the largest one.
    """

    total: int
    largest: int


def measure_config(
    config: PretrainedConfig, *, mixed_precision: str = "no", sequence_length: int | None = None
) -> MeasuredModel:
    """Measures the model that a configuration describes.

    Args:
        config: of a transformers model for text or images.
        mixed_precision: "no", "bf16" or "fp16": what is computed with.
        sequence_length: tokens in a sample of text. None: as many as the model takes, at most 1024.

    Raises:
        ValueError: the model's inputs are of another kind, or it cannot be built or run.
    """
    kind = model_class_of(config)
    with FakeTensorMode():
        try:
            model = _build(kind, config, _DTYPES[mixed_precision])
        except Exception as error:
            raise ValueError(f"{kind.__name__} cannot be built from this configuration: {error}") from error
        counts, matrices = _count(model)
        inputs = [_inputs(config, model, samples, sequence_length, _DTYPES[mixed_precision]) for samples in (1, 2)]
        try:
            one, two = (saved_bytes(model, values) for values in inputs)
            flops = _count_flops(model, inputs[0])
        except Exception as error:
            raise ValueError(f"{kind.__name__} cannot be run on fake tensors: {error}") from error
    return MeasuredModel(
        f"{kind.__name__}, {_describe(inputs[0])}",
        counts,
        matrices,
        # The difference of two samples and one; the constant part (position indices, masks) is negligible beside it.
        float(max(two.total - one.total, 0)),
        2.0 * max(two.largest - one.largest, 0),
        float(flops),
    )


def _build(kind: type[nn.Module], config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """A model with uninitialised weights in `dtype`: some initialisations would read values of fake tensors."""
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    return model.train()


def _count(model: nn.Module) -> tuple[ModelCounts, tuple[tuple[int, int], ...]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    units = [
        sum({id(p): p.numel() for module in unit for p in module.parameters()}.values())
        for unit in choose_units(model)
    ]
    counts = ModelCounts(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(parameter.numel() for parameter in trainable),
        tuple(units),
    )
    shapes = [parameter.shape for parameter in trainable]
    return counts, tuple((shape[0], shape[1:].numel()) if shape else (1, 1) for shape in shapes)


def saved_bytes(model: nn.Module, inputs: dict[str, Any]) -> SavedBytes:
    """The bytes that autograd keeps between forward and backward, each storage counted once."""
    known = [*model.parameters(), *model.buffers(), *(v for v in inputs.values() if isinstance(v, torch.Tensor))]
    known_storages = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, torch.Tensor] = {}  # tensors stay alive, so that no storage takes the place of another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in known_storages:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**inputs).loss
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    del loss
    return SavedBytes(sum(sizes), max(sizes, default=0))


def _count_flops(model: nn.Module, inputs: dict[str, Any]) -> int:
    aten = torch.ops.aten
    # torch has formulas for the attention kernels of GPUs only.
    attention_on_cpus = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    counter = FlopCounterMode(display=False, custom_mapping=attention_on_cpus)
    with counter:
        model(**inputs).loss.backward()
    return counter.get_total_flops()


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **options: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **options: Any
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _inputs(
    config: PretrainedConfig, model: nn.Module, samples: int, sequence_length: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """A batch of `samples` samples with labels, as the model's forward takes it."""
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size] * 2
        images = torch.zeros(samples, getattr(config, "num_channels", 3), *size, dtype=dtype)
        return {"pixel_values": images, "labels": torch.zeros(samples, dtype=torch.long)}
    if name == "input_ids":
        text = config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or _LONGEST_SEQUENCE
        length = sequence_length or min(most, _LONGEST_SEQUENCE)
        if length > most:
            raise ValueError(f"found a sequence length of {length}, expected at most {most}, what the model takes")
        tokens = torch.zeros(samples, length, dtype=torch.long)
        is_classifier = "Classification" in type(model).__name__ and "Token" not in type(model).__name__
        return {"input_ids": tokens, "labels": torch.zeros(samples, dtype=torch.long) if is_classifier else tokens}
    raise ValueError(f"found a model whose input is {name}, expected input_ids (text) or pixel_values (images)")


def _describe(inputs: dict[str, Any]) -> str:
    if "pixel_values" in inputs:
        return " x ".join(str(size) for size in inputs["pixel_values"].shape[2:]) + " pixels"
    return f"{inputs['input_ids'].shape[1]} tokens"
