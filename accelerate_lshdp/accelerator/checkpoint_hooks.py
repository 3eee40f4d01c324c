# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a script's hooks of ``save_state`` and ``load_state`` take over: models that they save and load themselves.

accelerate's contract: a save hook gets the models, their state dicts and the folder before anything is written there,
and takes out of the list of state dicts what it has saved itself. A load hook gets the models and the folder before
anything is read, and takes out of the list of models what it has loaded itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_lshdp.runtime.object_exchange import all_objects, errors_on_all_ranks, raise_failure_on_all_ranks


Weights = dict[str, torch.Tensor]
SaveHook = Callable[[list[nn.Module], list[Weights], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


def run_save_hooks(
    hooks: Iterable[SaveHook], models: Sequence[nn.Module], weights: Sequence[Weights], folder: str
) -> frozenset[int]:
    """Calls the hooks of ``save_state`` on every rank (collective).

    Args:
        hooks: in the order in which they are called.
        models: of the accelerator.
        weights: the full state of each model on the ranks that have it, else empty.
        folder: what a hook writes into it becomes a part of the checkpoint.

    Returns:
        Indices of the models whose state a hook took out of the list on any rank: many do so on the main process
        only, because only that writes.

    Raises:
        RuntimeError: on all ranks, if a hook fails on one of them or changes what the checkpoint is to hold.
    """
    left = list(weights)
    before = [dict(state) for state in weights]
    taken: set[int] = set()
    with errors_on_all_ranks("a hook of save_state"):
        for hook in hooks:
            hook(list(models), left, folder)
        taken = _taken(weights, left, "save_state", "state dict")
        for index, (state, known) in enumerate(zip(weights, before, strict=True)):
            if index not in taken and not _is_same(state, known):
                raise ValueError(
                    f"a hook of save_state changed the state dict of model {index}, but a checkpoint holds the model "
                    "as it is. Save the changed one in a file of the hook's own and take the state dict out of the "
                    "list; a hook of load_state then loads the model and takes it out of its list"
                )
    return frozenset().union(*all_objects(taken))


def run_load_hooks(hooks: Iterable[LoadHook], models: Sequence[nn.Module], folder: str) -> frozenset[int]:
    """Calls the hooks of ``load_state`` on every rank (collective).

    Args:
        hooks: in the order in which they are called.
        models: of the accelerator.
        folder: the checkpoint on this node.

    Returns:
        Indices of the models that the hooks took out of the list, the same on all ranks.

    Raises:
        RuntimeError: on all ranks, if a hook fails on one of them, or the ranks took different models.
    """
    left = list(models)
    taken: set[int] = set()
    with errors_on_all_ranks("a hook of load_state"):
        for hook in hooks:
            hook(left, folder)
        taken = _taken(models, left, "load_state", "model")
    everywhere = all_objects(taken)
    if any(other != taken for other in everywhere):
        found = "; ".join(f"rank {rank}: {sorted(indices)}" for rank, indices in enumerate(everywhere))
        raise_failure_on_all_ranks(
            "a hook of load_state",
            f"it took other models on some ranks than on others ({found}), which would leave them different. Load "
            "and take them on every rank",
        )
    return frozenset(taken)


def _taken(given: Sequence[Any], left: Sequence[Any], call: str, kind: str) -> set[int]:
    """Indices of what is not left; raises ValueError if there is something that was not given."""
    kept = {id(thing) for thing in left}
    foreign = [thing for thing in left if not any(thing is one for one in given)]
    if foreign:
        raise ValueError(
            f"a hook of {call} added or replaced a {kind} in its list, which it may only take out of it; "
            f"found {len(left)} in the list, {len(foreign)} of them not of the {len(given)} that it was given"
        )
    return {index for index, thing in enumerate(given) if id(thing) not in kept}


def _is_same(state: Weights, known: Weights) -> bool:
    return state.keys() == known.keys() and all(state[name] is known[name] for name in known)
