# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Refuses gradients of gradients, where what they are computed from is gone after the first backward."""

from __future__ import annotations

import torch


def refuse_gradients_of_gradients() -> None:
    """Raises RuntimeError if the backward that is under way makes a graph itself; called in the middle of it."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "found gradients of gradients (create_graph=True) of a model whose whole parameters exist for one forward "
            "and one backward only. Use strategy ddp, or on CPUs lsdp with the memory that the ranks of a node share"
        )
