# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The gradients of a node in one message, and what each of its ranks adds to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerate_lshdp.engine.wire.reduction import GradientReduction


@dataclass
class SharedBucket:
    """A bucket of the gradients of a node: one message between nodes, owned by one rank of the node.

    Attributes:
        buffer: all of them, 1-D, in shared memory.
        views: of each one.
        owner: local rank that sums it between nodes and updates its parameters.
        reduction: sums it between nodes; None on one node, and on ranks that do not own it.
    """

    buffer: torch.Tensor
    views: list[torch.Tensor]
    owner: int
    reduction: GradientReduction | None


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
