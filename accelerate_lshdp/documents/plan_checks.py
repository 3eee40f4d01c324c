# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checks of a plan that concern several of its sections, or the run that is to follow it."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.documents.cluster import Cluster
from accelerate_lshdp.documents.placement import ModelPlacement, UnitStore
from accelerate_lshdp.documents.plan_sections import Automatic, Batch, Communication, Elastic
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.documents.value_checks import PlanError
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS


def check_sections_agree(
    strategy: Strategy,
    communication: Communication,
    batch: Batch | None,
    cluster: Cluster | None,
    automatic: Automatic | None,
    placement: ModelPlacement | None = None,
) -> None:
    """Checks that the sections of a plan do not contradict each other.

    Raises:
        PlanError: two sections contradict each other; its path names one of them.
    """
    if batch is not None and cluster is not None:
        ranks = sum(cluster.node_sizes)
        if ranks != len(batch.ranks):
            raise PlanError(
                f"found {ranks} ranks on the nodes {cluster.node_sizes}, expected the {len(batch.ranks)} of"
                " batch.ranks. Correct one of the two.",
                path="cluster.nodes",
            )
    if batch is not None and automatic is not None:
        _check_automatic_start(batch, automatic)
    if WIRE_FORMATS[communication.dtype].between_nodes_only:
        _check_format(communication.dtype, strategy, placement)


def check_elastic(elastic: Elastic | None, automatic: Automatic | None, placement: ModelPlacement | None) -> None:
    """Checks that a run whose nodes come and go finds its batch sizes itself.

    Raises:
        PlanError: its batch sizes or its placement are for certain ranks.
    """
    if elastic is None:
        return
    if automatic is None:
        raise PlanError(
            'found no automatic batch sizes, expected the section "automatic": the ranks of an elastic run change.'
            ' Add "automatic": {"total": ...}, or leave "elastic" out.',
            path="elastic",
        )
    if placement is not None:
        raise PlanError(
            "found a placement of the model's units, which is made for the memory of certain ranks, expected none."
            ' Choose another strategy than "osdp".',
            path="placement",
        )


def _check_format(dtype: str, strategy: Strategy, placement: ModelPlacement | None) -> None:
    """Checks that no unit is shared by all ranks, which a format that travels between nodes only needs."""
    # World-sharded units are reduced one by one through FSDP2, which has no buffers that stay the same.
    if placement is None:
        shared = [f'strategy "{strategy}"'] if strategy.is_world_sharded else []
        others = [each for each in Strategy if not (each.is_world_sharded or each.traits.is_per_unit)]
        instead = f"strategy {_one_of(others)}"
    else:
        stores = [each.store for each in placement.placements]
        shared = [f'a unit in store "{store}"' for store in stores if store.strategy.is_world_sharded]
        others = [store for store in UnitStore if not store.strategy.is_world_sharded]
        instead = f"only units in store {_one_of(others)}"
    if shared:
        formats = [name for name, form in WIRE_FORMATS.items() if not form.between_nodes_only]
        raise PlanError(
            f'found "{dtype}" with {shared[0]}, expected {_one_of(formats)}: all ranks share one copy of the '
            f"parameters, whose gradients do not travel this way. Choose one of those, or {instead}.",
            path="communication.dtype",
        )


def _one_of(names: Sequence[str]) -> str:
    words = [f'"{name}"' for name in names]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _check_automatic_start(batch: Batch, automatic: Automatic) -> None:
    """Checks that a run with automatic batch sizes can start from the sizes in `batch`."""
    if batch.total != automatic.total:
        found = "none" if automatic.total is None else automatic.total
        raise PlanError(
            f"found {found}, expected {batch.total}, the total of batch, which the run starts"
            " with. Correct one of the two, or leave batch out.",
            path="automatic.total",
        )
    counts = [entry.accumulation_steps for entry in batch.ranks]
    if len(set(counts)) > 1:
        raise PlanError(
            f"found accumulation_steps {counts} together with automatic batch sizes, expected the same number on"
            " every rank: sizes are re-balanced, numbers of micro-batches are not.",
            path="batch.ranks",
        )


def check_fits_run(
    strategy: Strategy,
    batch: Batch | None,
    cluster: Cluster | None,
    *,
    world_size: int,
    shard_groups: Sequence[Sequence[int]],
    node_sizes: Sequence[int],
) -> None:
    """Checks that the sections of a plan fit the processes of a run.

    Args:
        strategy: the plan's strategy, for the error message.
        batch: the plan's batch sizes; None fits any number of ranks.
        cluster: the plan's nodes; None fits any nodes.
        world_size: number of ranks of the run.
        shard_groups: the ranks that share one copy of the parameters, group by group, covering all ranks once.
        node_sizes: ranks on each node of the run, in rank order.

    Raises:
        PlanError: the plan does not fit the run.
    """
    if batch is not None and len(batch.ranks) != world_size:
        planned = len(batch.ranks)
        raise PlanError(
            f"found batch sizes for {planned} ranks, expected {world_size}, the processes of this run."
            f" Launch {planned} processes, or make a plan for {world_size}.",
            path="batch.ranks",
        )
    if cluster is not None and cluster.node_sizes != list(node_sizes):
        raise PlanError(
            f"found nodes of {cluster.node_sizes} ranks, expected {list(node_sizes)}, the nodes of this"
            " run. Launch as the plan says, or correct or remove its cluster.",
            path="cluster.nodes",
        )
    if batch is None:
        return
    for group in shard_groups:
        # A rank with fewer micro-batches would leave the others waiting in a gather that it never joins.
        counts = [batch.ranks[rank].accumulation_steps for rank in group]
        if len(set(counts)) > 1:
            raise PlanError(
                f"found accumulation_steps {counts} on ranks {list(group)}, which share one copy of the"
                f' parameters under "{strategy}", expected equal numbers inside the group (its ranks'
                " gather parameters, or add gradients, together). Make them equal, or use a strategy that"
                " does not shard across these ranks.",
                path="batch.ranks",
            )
