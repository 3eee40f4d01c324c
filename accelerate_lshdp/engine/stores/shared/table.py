# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The table in shared memory in which each rank of a node publishes how far it has come."""

from __future__ import annotations

from enum import Enum

import numpy as np

from accelerate_lshdp.engine.stores.shared.memory import Layout, NodeMemory


class BarrierPurpose(Enum):
    """The call for which the ranks of a node wait for each other; the value names it in messages."""

    STEP_BEGINS = "the optimizer's step"
    STEP_ENDS = "the end of the optimizer's step"
    CLIPPING = "gradient clipping"
    LOADING = "load_state_dict"
    UNSCALING = "unscaling gradients of fp16"


#: In the order of their numbers in the table.
BARRIER_PURPOSES = list(BarrierPurpose)


class NodeTable:
    """The progress of each rank of the node, in shared memory. Backwards are numbered from 1.

    Every place has one rank that writes it, and counters only grow: so readers need no lock, and see an older state at
    worst. Numbers are 8 bytes, aligned, which processors write as a whole. Neither numpy nor Python orders these
    writes for other processors: ``NodeRanks`` does, around each of them.

    Attributes:
        entered: the backward that each rank has begun, shape (ranks,).
        added: the backward whose part each rank has added to each bucket, shape (ranks, buckets).
        final: the backward whose sum over all nodes each bucket holds, shape (buckets,).
        taken: the backward whose sums each rank has copied from all buckets, shape (ranks,); used where every rank has
            gradients of its own.
        failed: the last backward of each rank that failed, shape (ranks,).
        arrived: how many barriers each rank has come to, shape (ranks,).
        purposes: which ``BarrierPurpose`` each rank came to, shape (2, ranks): used in turn, as ``posted``.
        collectives: how many collectives of the world each rank has made, shape (ranks,).
        changed: the last backward (1: the beginning) after which each rank has changed parameters by hand, shape
            (ranks,).
        stepped: the optimizer's step in which each rank has stepped its parameters of each part of the model, shape
            (ranks, parts); steps are numbered from 1. Used where parts are stepped one after the other.
        broken: the last of these steps that each rank has failed to make, shape (ranks,).
        votes: whether each rank can keep gradients for itself until the last micro-batch of a step, from the next one
            on, and whether it has done so in this one (-1: it has none); shape (2, ranks, 2), used in turn.
        posted: numbers for the others, shape (2, numbers): used in turn, so that one can be read while the next
            is written.
    """

    def __init__(self, ranks: int, buckets: int, numbers: int, layout: Layout, parts: int = 0) -> None:
        one_a_rank = ("entered", "failed", "arrived", "collectives", "taken", "broken", "changed")
        self._shapes = {**dict.fromkeys(one_a_rank, (ranks,)), "added": (ranks, buckets), "final": (buckets,)}
        self._shapes |= {"purposes": (2, ranks), "stepped": (ranks, parts), "votes": (2, ranks, 2)}
        self._places = {name: layout.place(8 * int(np.prod(shape))) for name, shape in self._shapes.items()}
        self._numbers = numbers
        self._posted_place = layout.place(16 * numbers)

    def map(self, memory: NodeMemory) -> None:
        """Maps the table's arrays into the memory that was made from the layout."""
        for name, shape in self._shapes.items():
            setattr(self, name, memory.array(self._places[name], shape, np.int64))
        self.posted = memory.array(self._posted_place, (2, self._numbers), np.float64)
