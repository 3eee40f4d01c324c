# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`BucketLayout`: which gradients, or rows of them, are in which bucket of a node, and in which order these come."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """What a bucket has of a parameter's gradient.

    Attributes:
        parameter: index among the trainable ones.
        rows: of the gradient; None: all of it.
        starts: whether a step's first backward puts this in the place of what is there; else it is always added.
        ends: whether the gradient is complete when all ranks have added this.
    """

    parameter: int
    rows: slice | None = None
    starts: bool = True
    ends: bool = True

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor of the parameter's shape: a view."""
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The buckets of a model in the order in which every rank hands them in.

    Attributes:
        pieces: by number; the first ones are whole gradients, so that their numbers are those of the parameters. Not
            all of them have to be in a bucket.
        buckets: numbers of the pieces in each.
        owned_with: buckets, by number, that have the owner of another one; these lie one after the other in memory.
        again: of a bucket that adds to what another one before it has summed inside the node, that one's number. Both
            are the same memory, and only the later one is summed between nodes.
    """

    pieces: list[GradientPiece]
    buckets: list[list[int]]
    owned_with: dict[int, int] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
