# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Policies of a placement in which units of one model keep their parameters in different ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate_lshdp.documents.placement import ModelPlacement, UnitStore
from accelerate_lshdp.documents.strategy import Strategy
from accelerate_lshdp.engine.policies import Mechanism, ShardingPolicies, resolve_policies
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.topology import Topology


def resolve_placement(placement: ModelPlacement, topology: Topology, **options: Any) -> ShardingPolicies:
    """Resolves the stores of a placement, each as the strategy that keeps all units so.

    Args:
        placement: of the plan.
        topology: nodes and ranks.
        **options: as for `resolve_policies`.

    Returns:
        The policies of the model as a whole: the mechanism that needs most care, and the largest groups that share
        parameters. The policies of each store are in ``of_stores``.

    Raises:
        ValueError: a store does not exist on these nodes, or an option is against one.
    """
    stores = dict.fromkeys(each.store for each in placement.placements)
    of_stores = {store: _resolve_store(store, topology, options) for store in stores}
    # Whole parameters are the least to know of, shards the most: callers ask for the worst that there is.
    order = [Mechanism.REPLICATED, Mechanism.NODE_SHARED, Mechanism.STREAMED, Mechanism.FSDP2]
    hardest = max(of_stores.values(), key=lambda policies: order.index(policies.mechanism))
    # Loops may differ between ranks that share no parameters of any unit.
    widest = max(of_stores.values(), key=lambda policies: max(map(len, policies.shard_groups)))
    between_nodes = min(of_stores.values(), key=lambda policies: policies.strategy.is_world_sharded)
    notices = dict.fromkeys(policies.notice for policies in of_stores.values() if policies.notice)
    return replace(
        of_stores[placement.default.store],
        strategy=Strategy.OSDP,
        mechanism=hardest.mechanism,
        shard_groups=widest.shard_groups,
        replica_groups=between_nodes.replica_groups,
        notice="; ".join(notices) or None,
        of_stores=of_stores,
        reshards_to_node=False,
    )


def _resolve_store(store: UnitStore, topology: Topology, options: dict[str, Any]) -> ShardingPolicies:
    if store.reshards_to_node and topology.is_uneven:
        raise ValueError(
            f'found a unit in store "{store}" on nodes of {list(topology.node_sizes)} ranks, expected as many ranks '
            f'on every node: the shards of a node are parts of those of the world. Use "{UnitStore.WORLD}" or '
            f'"{UnitStore.WORLD_KEPT}"'
        )
    if store.reshards_to_node and options.get("reshard_after_forward") is False:
        raise ValueError(
            f'found reshard_after_forward=False with a unit in store "{store}", which keeps the shards of its node '
            f"alone after the forward, expected no such option: leave out {option_advice('reshard_after_forward')}, "
            f'or use "{UnitStore.WORLD}" or "{UnitStore.WORLD_KEPT}"'
        )
    policies = resolve_policies(store.strategy, topology, **options)
    # On one node its shards are those of the world; where a node has one rank, that one keeps all of the unit.
    if store.reshards_to_node and topology.num_nodes > 1 and policies.mechanism is Mechanism.FSDP2:
        several = topology.node_sizes[0] > 1
        return replace(policies, reshards_to_node=several, reshard_after_forward=several)
    return policies
