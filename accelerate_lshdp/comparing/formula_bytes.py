# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How many bytes a node has to send to others in a step, by what the strategies do (docs/how_it_works.md)."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.comparing.cases import Case
from accelerate_lshdp.documents.collectives import collectives_of
from accelerate_lshdp.documents.placement import UnitPlacement
from accelerate_lshdp.documents.strategy import Gathered, SharedBy, strategy_traits
from accelerate_lshdp.documents.wire_format import WIRE_FORMATS
from accelerate_lshdp.planning.cost.cluster_model import ModelSize


def formula_bytes(
    case: Case,
    nodes: Sequence[int],
    size: ModelSize,
    micro_batches: int = 1,
    wire_bytes: float | None = None,
    placements: tuple[Sequence[UnitPlacement], UnitPlacement] | None = None,
) -> list[float]:
    """Bytes between nodes of one step, one number a node.

    With N nodes and W ranks: the ring of plain DDP sends 2(W-1)/W * S for S bytes from each node, an all-reduce over
    one rank a node 2(N-1)/N * S; all-gather and reduce-scatter half of that. World-sharded strategies gather every
    unit once in the forward and (but for ``zero2``, and units that keep the node's shards) once in the backward, what
    is in no unit once, and reduce gradients once. Units of several stores send what each of them says.

    Args:
        case: strategy and format.
        nodes: ranks of each node.
        size: of the model.
        micro_batches: of each rank; only world-sharded strategies send more with more of them.
        wire_bytes: of all gradients in the case's format; None: by a format whose size does not depend on the model.
        placements: of the units and of the rest of the model. None: all are kept as the strategy says.

    Raises:
        ValueError: the format's size depends on the model and `wire_bytes` is not given.
    """
    if wire_bytes is None:
        if WIRE_FORMATS[case.communication_dtype].wire_share is None:
            raise ValueError(f"found format {case.communication_dtype} without wire_bytes, expected them")
        wire_bytes = size.gradient_bytes * WIRE_FORMATS[case.communication_dtype].wire_share
    if len(nodes) == 1:
        return [0.0]
    units = [*((unit, False) for unit in size.unit_bytes), (size.root_bytes, True)]
    if placements is None:
        kept = [(strategy_traits(case.strategy), False)] * len(units)
    else:
        stores = [placement.store for placement in (*placements[0], placements[1])]
        kept = [(store.strategy.traits, store.reshards_to_node) for store in stores]
    sent = [0.0] * len(nodes)
    for (unit, is_root), (traits, reshards_to_node) in zip(units, kept, strict=True):
        collectives = collectives_of(traits, nodes, case.communication_dtype)
        reduced = wire_bytes * unit / size.parameter_bytes
        if traits.shared_by is not SharedBy.WORLD:
            exchanges = [collectives.all_reduce(reduced, nodes)]
        else:
            forwards = 1 if traits.gathered is Gathered.EACH_STEP else micro_batches  # that gather
            again = traits.gathered is Gathered.EACH_PASS and not (is_root or reshards_to_node)
            gathered = forwards * (2 if again else 1) * unit
            exchanges = [collectives.gather(gathered, nodes), collectives.reduce_scatter(reduced, nodes)]
        sent = [own + sum(e.sent_bytes[node] for e in exchanges) for node, own in enumerate(sent)]
    return sent
