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

from accelerate_lshdp.documents.unit_sizes import ModelUnits
from accelerate_lshdp.engine.unit_measurement import measure_units
from accelerate_lshdp.estimation.model_sources import model_class_of
from accelerate_lshdp.planning.cost.memory import STATE_BYTES, ModelCounts


if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LONGEST_SEQUENCE = 1024
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MeasuredModel:
    """Sizes and operations of a model.

    Args:
        name: its class, and the kind of one sample.
        units: the sizes of its units.
        matrices: (rows, columns) of each trainable parameter; vectors have one column.
        flops: operations of forward and backward of one sample; a multiplication and an addition are two.
    """

    name: str
    units: ModelUnits
    matrices: tuple[tuple[int, int], ...]
    flops: float

    @property
    def counts(self) -> ModelCounts:
        """Numbers of its parameters."""
        everything = (*self.units.units, self.units.root)
        return ModelCounts(
            sum(unit.parameters for unit in everything),
            sum(unit.trainable for unit in everything),
            tuple(unit.parameters for unit in self.units.units),
        )

    @property
    def activation_bytes(self) -> float:
        """Bytes that are kept for the backward of one sample."""
        return self.units.activation_bytes

    @property
    def transient_bytes(self) -> float:
        """Bytes of the largest of these tensors for one sample, twice: two gradients beside it for a moment."""
        return self.units.working_bytes

    def activations(self, samples: int) -> float:
        """Bytes of activations of a micro-batch of `samples` samples, with the largest gradient of an activation."""
        return samples * (self.activation_bytes + self.transient_bytes)


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
        inputs = [_inputs(config, model, samples, sequence_length, _DTYPES[mixed_precision]) for samples in (1, 2)]
        try:
            units, flops = measure_units(
                model,
                inputs,
                (1, 2),
                output_loss,
                mixed_precision=mixed_precision,
                parameter_bytes=STATE_BYTES[mixed_precision].parameter,  # here it has those of its forward
            )
        except Exception as error:
            raise ValueError(f"{kind.__name__} cannot be run on fake tensors: {error}") from error
    return MeasuredModel(f"{kind.__name__}, {_describe(inputs[0])}", units, _matrices(model), flops)


def output_loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The loss that a transformers model computes of inputs with labels."""
    return model(**inputs).loss


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


def _matrices(model: nn.Module) -> tuple[tuple[int, int], ...]:
    shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    return tuple((shape[0], shape[1:].numel()) if shape else (1, 1) for shape in shapes)


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
