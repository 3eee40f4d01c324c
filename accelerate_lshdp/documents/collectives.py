# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The collectives between nodes that strategies make of parameters and gradients, for predictions and byte counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.network import (
    Collective,
    Exchange,
    all_to_all,
    quantised_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    shard_all_reduce,
    two_stage_all_gather,
    two_stage_reduce_scatter,
)
from accelerate_lshdp.documents.strategy import SharedBy, StrategyTraits
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


def group_sizes(traits: StrategyTraits, nodes: Sequence[int]) -> list[int]:
    """The number of ranks that share one copy of the parameters, for the ranks of each node: one entry a node.

    Nodes with different numbers of ranks cannot sum shards with each other, so there every rank holds a copy.
    """
    if traits.shared_by is SharedBy.WORLD:
        return [sum(nodes)] * len(nodes)
    # Equal nodes only: shards of different sizes have no partner on the other nodes.
    if traits.shared_by is SharedBy.NODE and len(set(nodes)) == 1:
        return list(nodes)
    return [1] * len(nodes)


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of a strategy between nodes, for parameters and gradients; None: it has no such exchange."""

    gather: Collective | None
    reduce_scatter: Collective | None
    all_reduce: Collective | None


def collectives_of(
    traits: StrategyTraits, nodes: Sequence[int], communication_dtype: str = "fp32", two_stage: bool = True
) -> Collectives:
    """The collectives of a strategy.

    Args:
        nodes: ranks on each node.
        communication_dtype: the format of gradients. Ranks cannot add int8 values with different scales, so int8 has
            collectives of its own.
        two_stage: world-sharded strategies exchange inside nodes and between them in two stages, where nodes have
            equal numbers of ranks.
    """
    even = len(set(nodes)) == 1
    if traits.shared_by is SharedBy.WORLD:
        if traits.is_plain:  # gloo's reduce-scatter is an all-reduce and a slice
            return Collectives(ring_all_gather, ring_all_reduce, None)
        # Two stages need shards of equal size on every node.
        if two_stage and even:
            return Collectives(two_stage_all_gather, two_stage_reduce_scatter, None)
        return Collectives(ring_all_gather, all_to_all, None)
    # Where each shard, or each whole gradient, is on one rank a node, these ranks sum it among themselves.
    added = WIRE_FORMATS[communication_dtype].is_added
    if not added and even and (traits.shared_by is SharedBy.NODE or nodes[0] == 1):
        return Collectives(None, None, quantised_all_reduce)
    if not added:
        return Collectives(None, None, _quantised_over_all_ranks)
    return Collectives(None, None, shard_all_reduce if traits.shared_by is SharedBy.NODE and even else ring_all_reduce)


def _quantised_over_all_ranks(payload: float, nodes: Sequence[int]) -> Exchange:
    """The exchange of `payload` bytes by an all-to-all, sums on every rank, and an all-gather of the sums."""
    scattered, gathered = all_to_all(payload, nodes), ring_all_gather(payload, nodes)
    return Exchange(
        tuple(map(sum, zip(scattered.sent_bytes, gathered.sent_bytes, strict=True))),
        tuple(map(sum, zip(scattered.handled_bytes, gathered.handled_bytes, strict=True))),
        scattered.rounds + gathered.rounds,
    )
