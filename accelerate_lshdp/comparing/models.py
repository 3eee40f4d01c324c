# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Models that a benchmark trains: transformers' own architectures with random weights, so nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn


if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_model(description: Mapping[str, Any], seed: int) -> nn.Module:
    """A model in training mode, the same on every rank.

    Args:
        description: ``kind`` (``vit`` or ``gpt2``) and arguments of its transformers configuration.
        seed: of its weights.
    """
    torch.manual_seed(seed)
    configuration = _configuration(description)
    if description["kind"] == "vit":
        from transformers import ViTForImageClassification

        return ViTForImageClassification(configuration).train()
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(configuration).train()


def check_model(description: Mapping[str, Any]) -> None:
    """Checks, before any process is started, that transformers takes the arguments.

    Raises:
        ValueError: it does not.
    """
    try:
        _configuration(description)
    except Exception as error:  # its own checks raise errors of many kinds
        said = " ".join(str(error).split())[:300]
        raise ValueError(
            f"found arguments that transformers refuses ({said}), expected those of a configuration of kind"
            f" {description['kind']}. Correct them."
        ) from error


def _configuration(description: Mapping[str, Any]) -> PretrainedConfig:
    arguments = {key: value for key, value in description.items() if key != "kind"}
    if description["kind"] == "vit":
        from transformers import ViTConfig

        return ViTConfig(**arguments)
    from transformers import GPT2Config

    return GPT2Config(**arguments)


def narrowed(description: Mapping[str, Any]) -> dict[str, Any]:
    """The same model with as many parameters, which are small."""
    small = dict(description)
    if description["kind"] == "vit":
        small["hidden_size"] = small["intermediate_size"] = 4 * description.get("num_attention_heads", 12)
    else:
        small["n_embd"] = small["n_inner"] = 4 * description.get("n_head", 12)
    return small


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Its transformer blocks, which everybody shards one by one."""
    return list(model.vit.layers if hasattr(model, "vit") else model.transformer.h)


def measure(description: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """The number of parameters, and by name the bytes of each block's, in fp32; without memory for them."""
    with torch.device("meta"):
        model = build_model(description, seed=0)
    names = {module: name for name, module in model.named_modules()}
    return _count(model), {names[block]: 4 * _count(block) for block in blocks_of(model)}


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
