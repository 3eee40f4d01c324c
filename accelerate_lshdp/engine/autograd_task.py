# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whether autograd is computing gradients in this thread."""

from __future__ import annotations

import torch


def is_in_autograd() -> bool:
    """Whether autograd is computing gradients: a forward is then one of activations that are computed again."""
    return current_task() != -1


def current_task() -> int:
    """The number of the backward that autograd computes in this thread; -1: none."""
    return torch._C._current_graph_task_id()
