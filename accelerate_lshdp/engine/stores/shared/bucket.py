# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The gradients of a node in one message, and what each of its ranks adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accelerate_lshdp.engine.wire.reduction import GradientReduction


@dataclass
class SharedBucket:
    """A bucket of the gradients of a node: one message between nodes, owned by one rank of the node.

    Attributes:
        buffer: all of them, 1-D, in shared memory.
        views: the parts of it that a rank adds to one by one: of each gradient, or of all of them together.
        owner: local rank that sums it between nodes (and updates its parameters, where the node shares these).
        reduction: sums it between nodes; None on one node, and on ranks that do not own it.
        shapes: of the gradients in it; None: those of the views.
    """

    buffer: torch.Tensor
    views: list[torch.Tensor]
    owner: int
    reduction: GradientReduction | None
    shapes: Sequence[torch.Size] | None = None

    def __post_init__(self) -> None:
        if self.shapes is None:
            self.shapes = [view.shape for view in self.views]


@dataclass
class Contribution:
    """This rank's part of a bucket in one backward; it keeps autograd's tensors alive until the thread has added them.

    Attributes:
        backward: number of the backward, counted from 1.
        index: of the bucket.
        gradients: one a view of the bucket; None: this rank has none.
        fresh: for each, whether a gradient takes the place of what is there (done by the first rank).
        synchronise: whether the sum is to go between nodes after this.
    """

    backward: int
    index: int
    gradients: list[torch.Tensor | None]
    fresh: list[bool]
    synchronise: bool
