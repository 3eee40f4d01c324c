# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Moves a model's buffers to the device, where they stay."""

from __future__ import annotations

import functools

import torch
from torch import nn

from accelerate_lshdp.engine.attachments import Attachments


def move_buffers(module: nn.Module, device: torch.device, attachments: Attachments) -> None:
    """Moves a module's buffers to the device, and back when the attachments are removed."""
    for buffer in module.buffers():
        attachments.at_removal(functools.partial(move, buffer, buffer.device))
        move(buffer, device)


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """Moves a tensor and its gradient, in place."""
    if tensor.device != device:
        gradient, tensor.grad = tensor.grad, None
        tensor.data = tensor.data.to(device)
        tensor.grad = None if gradient is None else gradient.to(device)
