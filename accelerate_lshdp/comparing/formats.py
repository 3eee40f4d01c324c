# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Formats for gradients as a comparison of a few steps uses them: their options, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


def without_exact_steps(name: str) -> dict[str, int]:
    """The options of a format with which a few steps show what many would take."""
    return {option: 0 for option in WIRE_FORMATS[name].options if option.endswith("warmup_steps")}


def model_wire_bytes(name: str, shapes: Sequence[Sequence[int]]) -> float:
    """The bytes of all gradients of a model in one format: an all-reduce of so many sends as much.

    Args:
        name: ``communication.dtype``.
        shapes: of the model's parameters.
    """
    # Imported here, as processes of plain PyTorch, whose memory is compared, read the options above only.
    import torch

    from accelerate_lshdp.engine.wire.formats import wire_bytes

    gradients = torch.empty(sum(map(prod, shapes)), device="meta")
    return wire_bytes(Communication(name, **without_exact_steps(name)), gradients, shapes)
