# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Finds parameters that two models of one accelerator would both manage: their gradients would be summed twice."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn

from accelerate_lshdp.engine.module_state import parameters_of
from accelerate_lshdp.engine.prepared import PreparedModel


def refuse_shared_parameters(
    model: nn.Module,
    others: Iterable[PreparedModel],
    replaced: Mapping[int, tuple[weakref.ref, nn.Parameter]],
    *,
    frozen_too: bool,
) -> None:
    """Checks that a model has no parameter of one that was prepared before.

    Each prepared model sums the gradients of its own parameters over the ranks. A parameter of two of them would be
    divided and summed by both, or be moved or sharded by the second away from where the first one keeps it.

    Args:
        model: about to be prepared for training.
        others: what was prepared before.
        replaced: by the id of a parameter, a reference to it and the sharded one that has taken its place.
        frozen_too: whether preparing moves parameters that are not trained, too.

    Raises:
        ValueError: naming the first such parameter.
    """
    owners = {
        id(parameter): other.module
        for other in others
        for parameter in (parameters_of(other.module) if frozen_too else other.trainable_parameters())
    }
    shared = []
    for name, parameter in model.named_parameters():
        # Sharding replaces parameters, so a part that two models share still has the old one. The reference tells
        # whether an id is still that of the same object, or of a new one in its place.
        known = replaced.get(id(parameter))
        current = known[1] if known is not None and known[0]() is parameter else parameter
        if id(current) in owners and (frozen_too or parameter.requires_grad):
            shared.append((name, owners[id(current)]))
    if shared:
        name, owner = shared[0]
        raise ValueError(
            f"found {len(shared)} parameters ({name} is the first) of this {type(model).__name__} in a "
            f"{type(owner).__name__} that was prepared before: both would sum their gradients over the ranks. Prepare "
            "models that share parameters, or a model and a part of it, as one: a module that holds all of them and "
            "whose forward calls them, given to prepare() once"
        )
