# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the strategies do, as data for predictions: who shares a copy of the parameters, and what travels how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

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


class SharedBy(str, Enum):
    """The ranks that share one copy of the parameters."""

    NOBODY = "nobody"
    NODE = "node"
    WORLD = "world"


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """What one strategy does.

    Args:
        shared_by: the ranks that share one copy of parameters, gradients and optimizer states.
        gathers_twice: parameters are gathered in each forward and each backward; else once a step.
        is_offloaded: the copy is in host memory.
        overlaps: on devices without streams, too, gradients travel between nodes while the backward goes on.
        is_plain: of PyTorch alone, with what it does on gloo.
        is_unequal: ranks get batches that suit their speed.
    """

    shared_by: SharedBy
    gathers_twice: bool = False
    is_offloaded: bool = False
    overlaps: bool = True
    is_plain: bool = False
    is_unequal: bool = False


_WORLD = {"shared_by": SharedBy.WORLD, "overlaps": False}

STRATEGIES: dict[str, StrategyTraits] = {
    "torch_ddp": StrategyTraits(SharedBy.NOBODY, is_plain=True),
    "torch_fsdp": StrategyTraits(**_WORLD, gathers_twice=True, is_plain=True),
    "torch_hsdp": StrategyTraits(SharedBy.NODE, gathers_twice=True, overlaps=False, is_plain=True),
    "ddp": StrategyTraits(SharedBy.NOBODY),
    "hdp": StrategyTraits(SharedBy.NOBODY, is_unequal=True),
    "fsdp": StrategyTraits(**_WORLD, gathers_twice=True),
    "fsdp_offload": StrategyTraits(**_WORLD, gathers_twice=True, is_offloaded=True),
    "zero2": StrategyTraits(**_WORLD),
    "group_sharding": StrategyTraits(SharedBy.NODE, gathers_twice=True),
    "lsdp": StrategyTraits(SharedBy.NODE, gathers_twice=True, is_offloaded=True),
    "lshdp": StrategyTraits(SharedBy.NODE, gathers_twice=True, is_offloaded=True, is_unequal=True),
}


def strategy_traits(strategy: str) -> StrategyTraits:
    """The traits of a strategy by its name.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"found strategy {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]


def group_sizes(traits: StrategyTraits, nodes: Sequence[int]) -> list[int]:
    """Of each node: among how many ranks the copy of the parameters that its ranks use is cut.

    Nodes with different numbers of ranks cannot sum shards with each other, so there every rank holds a copy.
    """
    if traits.shared_by is SharedBy.WORLD:
        return [sum(nodes)] * len(nodes)
    if traits.shared_by is SharedBy.NODE and len(set(nodes)) == 1:
        return list(nodes)
    return [1] * len(nodes)


@dataclass(frozen=True, slots=True)
class Collectives:
    """How a strategy's payloads travel between nodes; None: they do not."""

    gather: Collective | None
    reduce_scatter: Collective | None
    all_reduce: Collective | None


def collectives_of(
    traits: StrategyTraits, nodes: Sequence[int], communication_dtype: str = "fp32", two_stage: bool = True
) -> Collectives:
    """The collectives of a strategy.

    Args:
        nodes: ranks on each node.
        communication_dtype: int8 cannot be added on its way.
        two_stage: world-sharded strategies exchange inside nodes and between them in two stages, where nodes have
            equal numbers of ranks.
    """
    even = len(set(nodes)) == 1
    if traits.shared_by is SharedBy.WORLD:
        if traits.is_plain:  # gloo's reduce-scatter is an all-reduce and a slice
            return Collectives(ring_all_gather, ring_all_reduce, None)
        if two_stage and even:
            return Collectives(two_stage_all_gather, two_stage_reduce_scatter, None)
        return Collectives(ring_all_gather, all_to_all, None)
    if communication_dtype == "int8" and even and (traits.shared_by is SharedBy.NODE or nodes[0] == 1):
        return Collectives(None, None, quantised_all_reduce)
    if communication_dtype == "int8":
        return Collectives(None, None, _quantised_over_all_ranks)
    return Collectives(None, None, shard_all_reduce if traits.shared_by is SharedBy.NODE and even else ring_all_reduce)


def _quantised_over_all_ranks(payload: float, nodes: Sequence[int]) -> Exchange:
    scattered, gathered = all_to_all(payload, nodes), ring_all_gather(payload, nodes)
    return Exchange(
        tuple(map(sum, zip(scattered.sent_bytes, gathered.sent_bytes, strict=True))),
        tuple(map(sum, zip(scattered.handled_bytes, gathered.handled_bytes, strict=True))),
        scattered.rounds + gathered.rounds,
    )
