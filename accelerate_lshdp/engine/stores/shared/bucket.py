# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The gradients of a node in one message, what each of its ranks adds to them, and how these come there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_lshdp.engine.wire.reduction import GradientReduction


@dataclass
class SharedBucket:
    """A bucket of the gradients of a node: one message between nodes, owned by one rank of the node.

    Attributes:
        buffer: all of them, 1-D, in shared memory.
        views: the parts of it that a rank adds to one by one: of each gradient, or of all of them together.
        owner: local rank that sums it between nodes (and updates its parameters, where the node shares these).
        reduction: sums it between nodes; None on one node, on ranks that do not own it, and where another bucket goes
            on with the sum.
        shapes: of the gradients in it; None: those of the views.
        after: the bucket whose sum over the node this one adds to, in the same memory; None: there is none.
    """

    buffer: torch.Tensor
    views: list[torch.Tensor]
    owner: int
    reduction: GradientReduction | None
    shapes: Sequence[torch.Size] | None = None
    after: int | None = None

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
        noted: of the source when the gradients were handed in.
        is_aside: whether the gradients are in host memory of this rank's own, whatever the source is.
    """

    backward: int
    index: int
    gradients: list[torch.Tensor | None]
    fresh: list[bool]
    synchronise: bool
    noted: Any = None
    is_aside: bool = False

    @property
    def takes_memory(self) -> bool:
        """Whether it has gradients where they were computed."""
        return not self.is_aside and any(gradient is not None for gradient in self.gradients)


class GradientSource:
    """Where autograd's gradients are, and how they come into the sums of the node: here, from host memory."""

    def note(self) -> Any:
        """Takes note of what has to be done before gradients exist that are handed in now; by autograd's thread."""
        return None

    def is_computed(self, noted: Any) -> bool:
        """Whether the gradients are computed that were handed in with this result of `note`."""
        return True

    def bring(
        self,
        noted: Any,
        copied: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        summed: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        """Brings gradients of one bucket to their places; they are there when it returns. By the node's thread.

        Args:
            noted: what `note` gave when they were handed in.
            copied: places, and gradients that take the place of what is there.
            summed: places, and gradients that are added to what is there.
        """
        # One call for all tensors of a bucket, which leaves the interpreter to the backward for as long.
        if copied[0]:
            torch._foreach_copy_(*copied)
        if summed[0]:
            torch._foreach_add_(*summed)

    def set_aside(
        self, noted: Any, gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Copies gradients of one bucket to host memory of this rank's own, where there is another memory.

        Args:
            noted: what `note` gave when they were handed in.
            gradients: one a view; None: this rank has none.
            views: of the bucket.
        """
        return list(gradients)
