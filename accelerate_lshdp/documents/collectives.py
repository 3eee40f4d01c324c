# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The collectives between nodes that strategies make of parameters and gradients, for predictions and byte counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_lshdp.documents.network import (
    Collective,
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
    # Plain DDP sums over all ranks in one ring, and so does plain HSDP where shards have no partner.
    if traits.is_plain and not (traits.shared_by is SharedBy.NODE and even):
        return Collectives(None, None, ring_all_reduce)
    # Each shard is on one rank a node; what every rank has is summed to one rank of its node first. These ranks sum it
    # among themselves.
    added = WIRE_FORMATS[communication_dtype].is_added
    return Collectives(None, None, shard_all_reduce if added else quantised_all_reduce)
