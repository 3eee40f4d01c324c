# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`lay_out_slices`: the buckets of a model of which devices have some weights in slices.

Each slice of such a weight's gradient has a bucket, in the place where whole gradients of its module would come. A
weight that is used in more than one way (an embedding, or one that several modules have) has two buckets for each
slice, in the same memory: a backward's first product goes to the one, before all blocks, and is added there over the
node; what comes later goes to the other, at the end, which is then summed between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from accelerate_lshdp.engine.stores.shared.memory import ALIGNMENT
from accelerate_lshdp.engine.stores.shared.pieces import BucketLayout, GradientPiece
from accelerate_lshdp.engine.stores.sliced.choice import SlicedChoice
from accelerate_lshdp.engine.stores.sliced.rows import RowSlices
from accelerate_lshdp.engine.wire.buckets import fill_buckets


def slices_of(master: torch.Tensor, slices: int) -> RowSlices:
    """The slices of a weight in host memory; those of its gradient lie there one after the other, without gaps."""
    row = master.shape[1] * master.dtype.itemsize
    return RowSlices(master.shape[0], 1, slices, multiple=ALIGNMENT // math.gcd(ALIGNMENT, row))


@dataclass(frozen=True, slots=True)
class SlicedPieces:
    """Numbers of the pieces of one weight's gradient, by slice.

    Attributes:
        first: for the gradients of its first product in a backward; empty: the weight is that of one product.
        last: for all others.
    """

    first: list[int]
    last: list[int]


def lay_out_slices(
    parameters: Sequence[nn.Parameter],
    chosen: Mapping[int, SlicedChoice],
    bucket_bytes: int | None,
    reducing_ranks: int,
) -> tuple[BucketLayout, dict[int, SlicedPieces]]:
    """The buckets of a model with weights in slices.

    Args:
        parameters: the trainable ones.
        chosen: those in slices, by their index among these.
        bucket_bytes: as for `fill_buckets`.
        reducing_ranks: likewise.

    Returns:
        The layout, and the pieces of each weight in slices by its index.
    """
    pieces = [GradientPiece(index) for index in range(len(parameters))]
    of_weights: dict[int, SlicedPieces] = {}
    for index in sorted(chosen, reverse=True):  # as a backward usually comes to them
        choice = chosen[index]
        rows = slices_of(choice.parameter, choice.slices)
        whole = [GradientPiece(index, rows.own(0, number)) for number in range(rows.count)]
        numbers = list(range(len(pieces), len(pieces) + 2 * len(whole)))
        if len(choice.places) == 1 and not isinstance(choice.places[0][0], nn.Embedding):
            pieces += whole
            of_weights[index] = SlicedPieces([], numbers[: len(whole)])
        else:
            pieces += [replace(piece, ends=False) for piece in whole]
            pieces += [replace(piece, starts=False) for piece in whole]
            of_weights[index] = SlicedPieces(numbers[: len(whole)], numbers[len(whole) :])
    ordinary = [index for index in range(len(parameters)) if index not in chosen]
    filled = fill_buckets([parameters[index] for index in ordinary], bucket_bytes, reducing_ranks)
    buckets = [[ordinary[place] for place in bucket] for bucket in filled]
    for index, own in of_weights.items():
        if not own.first:
            later = (place for place, bucket in enumerate(buckets) if pieces[bucket[0]].parameter < index)
            place = next(later, len(buckets))
            buckets[place:place] = [[piece] for piece in own.last]
    twice = [own for own in of_weights.values() if own.first]
    buckets[:0] = [[piece] for own in twice for piece in own.first]
    buckets += [[piece] for own in twice for piece in own.last]
    bucket_of = {piece: number for number, bucket in enumerate(buckets) for piece in bucket}
    owned_with = {
        bucket_of[piece]: bucket_of[(own.first or own.last)[0]]
        for own in of_weights.values()
        for piece in (*own.first, *own.last)
    }
    again = {
        bucket_of[later]: bucket_of[first] for own in twice for first, later in zip(own.first, own.last, strict=True)
    }
    return BucketLayout(pieces, buckets, owned_with, again), of_weights
