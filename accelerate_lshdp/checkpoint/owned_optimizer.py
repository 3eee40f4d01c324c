# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Optimizer state of parameters that a node shares, merged from its ranks: each has that of what it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_lshdp.checkpoint.stream import TensorSource
from accelerate_lshdp.checkpoint.tensors import TensorEntry
from accelerate_lshdp.engine.stores.shared.ownership import NodeOwnership
from accelerate_lshdp.runtime.object_exchange import all_objects
from accelerate_lshdp.runtime.participants import place_of


@dataclass
class DescribedOptimizer:
    """An optimizer as it goes into a checkpoint.

    Attributes:
        document: options and state, see ``optimizer.describe``.
        sources: where the tensors of the state come from.
    """

    document: dict[str, Any]
    sources: list[TensorSource]


def merge_owned_state(
    optimizers: Sequence[torch.optim.Optimizer],
    described: Sequence[DescribedOptimizer],
    names: Mapping[int, str],
) -> list[DescribedOptimizer]:
    """Adds to each description what other ranks of this node own (collective, if nodes share parameters).

    Args:
        optimizers: of the run.
        described: as far as this rank has their state.
        names: id of a parameter -> its name.

    Returns:
        The same on all ranks.
    """
    # Ownership is part of how the model was prepared, so all ranks come to the same answer here, and to the
    # collective.
    owned = [_ownerships(optimizer, names) for optimizer in optimizers]
    if not any(owned):
        return list(described)
    states = all_objects([(d.document["state"], [source.entry for source in d.sources]) for d in described])
    return [_merge(described[i], owned[i], [of_rank[i] for of_rank in states]) for i in range(len(described))]


def _ownerships(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, NodeOwnership]:
    return {
        names[id(parameter)]: ownership
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (ownership := NodeOwnership.of(parameter)) is not None
    }


def _merge(
    mine: DescribedOptimizer,
    ownerships: Mapping[str, NodeOwnership],
    told: Sequence[tuple[dict[str, Any], list[TensorEntry]]],
) -> DescribedOptimizer:
    own = {source.entry.name: source for source in mine.sources}
    state: dict[str, Any] = {}
    sources: list[TensorSource] = []
    for name in (name for group in mine.document["groups"] for name in group["parameters"]):
        ownership = ownerships.get(name)
        owner = None if ownership is None else place_of(ownership.owner)
        of_owner, entries = (mine.document["state"], []) if owner is None else told[owner]
        if name not in of_owner:
            continue
        state[name] = of_owner[name]
        wanted = [value["tensor"] for value in of_owner[name].values() if "tensor" in value]
        if ownership is None:
            sources += [own[tensor] for tensor in wanted]
            continue
        by_name = {entry.name: entry for entry in entries}
        # Broadcast by the owner inside its node only: every node has an owner of its own for the parameter.
        for tensor in wanted:
            value = own[tensor].tensor if ownership.owned else None
            sources.append(TensorSource(by_name[tensor], value, owner, ownership.group))
    listed = {source.entry.name for source in sources}
    rest = [source for source in mine.sources if source.entry.name not in listed]  # of options, the same everywhere
    return DescribedOptimizer({**mine.document, "state": state}, [*rest, *sources])
