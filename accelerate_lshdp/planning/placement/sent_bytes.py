# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`bytes_between_nodes`: what each node sends to others in a step, summed over the units of a placement."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.documents.collectives import collectives_of
from accelerate_lshdp.documents.network import Exchange
from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement, UnitStore
from accelerate_lshdp.planning.placement.inputs import ModelSizes, UnitSize


def bytes_between_nodes(
    model: ModelSizes, placement: ModelPlacement, nodes: Sequence[int], steps: int = 1
) -> tuple[float, ...]:
    """Bytes that each node sends to other nodes in a step.

    Args:
        model: sizes of its units.
        placement: of all of them, by their names.
        nodes: ranks on each node.
        steps: micro-batches of a step.
    """
    each, sent = model.state_bytes, [0.0] * len(nodes)
    if len(nodes) == 1:
        return (0.0,)
    for unit in model.everything:
        placed = placement.of(unit.name)
        own = collectives_of(placed.store.strategy.traits, nodes)
        in_slices = unit.sliceable.parameters if placed.slices > 1 and unit.sliceable is not None else 0
        whole = unit.parameters - in_slices
        if own.all_reduce is not None:  # in slices or not, each gradient once a step
            exchanges = [own.all_reduce(unit.trainable * each.gradient, nodes)]
        else:
            gradient = min(whole, unit.trainable) * each.gradient
            gathers = _gathers_between_nodes(placed.store, steps, is_root=unit is model.root)
            exchanges = [own.gather(whole * each.gathered, nodes)] * gathers
            exchanges.append(own.reduce_scatter(gradient, nodes))
            if in_slices:
                exchanges += _of_slices(model, unit, placed, nodes) * steps
        for exchange in exchanges:
            sent = [before + more for before, more in zip(sent, exchange.sent_bytes, strict=True)]
    return tuple(sent)


def _of_slices(model: ModelSizes, unit: UnitSize, placed: UnitPlacement, nodes: Sequence[int]) -> list[Exchange]:
    """What a micro-batch exchanges of the weights of a unit that are in slices; see `traffic.TrafficOf.sliced`."""
    each, weights = model.state_bytes, unit.sliceable
    own = collectives_of(placed.store.strategy.traits, nodes)
    forward, backward = (own.gather(count * each.gathered, nodes) for count in (weights.forward, weights.backward))
    trained = min(weights.parameters, unit.trainable) / weights.parameters
    reduced = own.reduce_scatter(weights.forward * trained * each.gradient, nodes)
    return [forward, backward, reduced] + ([forward] if placed.checkpoint else [])


def _gathers_between_nodes(store: UnitStore, steps: int, *, is_root: bool) -> int:
    """How often a step gathers a world-sharded unit from other nodes."""
    if store is UnitStore.WORLD_KEPT:
        return 1
    # The root stays from a forward to its backward, and `world_to_node` finds its parameters in the node.
    return steps if is_root or store is UnitStore.WORLD_TO_NODE else 2 * steps
