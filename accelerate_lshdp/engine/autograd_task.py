# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Whether autograd is computing gradients in this thread."""

from __future__ import annotations

import torch


def is_in_autograd() -> bool:
    """Whether autograd is computing gradients: a forward is then one of activations that are computed again."""
    return torch._C._current_graph_task_id() != -1
