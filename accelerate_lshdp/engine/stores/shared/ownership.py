# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which rank of a node updates a parameter that the node shares, and optimizers that work with such parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.engine.stores.shared.reduction import NodeReduction
from accelerate_lshdp.runtime.option_advice import option_advice


@dataclass(frozen=True, slots=True)
class NodeOwnership:
    """The rank of the node that updates a parameter.

    Attributes:
        index: of the parameter among the trainable ones.
        owner: its global rank.
        owned: whether that is this rank.
        group: the ranks of this node.
        reduction: connects the ranks of the node.
    """

    index: int
    owner: int
    owned: bool
    group: dist.ProcessGroup
    reduction: NodeReduction

    @staticmethod
    def of(parameter: torch.Tensor) -> NodeOwnership | None:
        """The ownership of a parameter, None if every rank updates it itself."""
        return getattr(parameter, "_lshdp_node_ownership", None)

    def __reduce__(self) -> tuple:
        """Pickles as None, which is read without this package: a copy of a parameter belongs to no rank of a node."""
        return type(None), ()


#: Optimizers that have stepped with a part of their parameters on this rank, and those that they had then.
_divided: WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[torch.Tensor]]] = WeakKeyDictionary()


def refuse_divided_state(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer has no state which lacks that of other ranks of the node.

    Raises:
        ValueError: it has stepped with parameters that the node shared, and that it shares no more.
    """
    parameters = [reference() for reference in _divided.get(optimizer, ())]
    if optimizer.state and any(p is not None and NodeOwnership.of(p) is None for p in parameters):
        raise ValueError(
            "found an optimizer whose state is divided among the ranks of a node, which shared the parameters under "
            "the accelerator that prepared it before. Make a new optimizer for this one; or save_state with the first "
            "accelerator, and load_state with the second one into a new optimizer"
        )


def hide_unowned_gradients(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Sets ``.grad`` to None on parameters that another rank of the node updates, so that the optimizer skips them.

    Returns:
        Parameters and gradients to restore after the step.
    """
    hidden, shared = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ownership = NodeOwnership.of(parameter)
            if ownership is None:
                continue
            shared.append(parameter)
            if not ownership.owned and parameter.grad is not None:
                hidden.append((parameter, parameter.grad))
                parameter.grad = None
    if shared and optimizer not in _divided:
        _divided[optimizer] = [weakref.ref(parameter) for parameter in shared]
    return hidden


def check_optimizer(optimizer: torch.optim.Optimizer, new: Iterable[torch.Tensor]) -> str | None:
    """Checks that an optimizer can update the parameters of a node part by part.

    Args:
        optimizer: may have been checked before; since then each rank has made state of the parameters it updates.
        new: parameters that it was not checked with.

    Raises:
        ValueError: it treats all parameters as one, or has already stepped.

    Returns:
        What the user should know about it, or None.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shared = [parameter for parameter in parameters if NodeOwnership.of(parameter) is not None]
    if not shared:
        return None
    unchecked = {id(parameter) for parameter in new}
    states = [optimizer.state[p] for p in shared if id(p) in unchecked and p in optimizer.state]
    if any(state and state.get("step") != 0 for state in states):  # some have a state from the beginning
        raise ValueError(
            "the optimizer has already stepped (it holds state of parameters that another rank will update); call "
            "prepare() before the first step, and load_state() after it to continue a run"
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{name} treats all parameters as one vector, but each rank of a node updates some of them only; use "
            "another optimizer, or strategy ddp"
        )
    if not type(optimizer).__module__.startswith(("torch.optim", "transformers.")):
        return (
            f"each rank of a node updates some of the parameters: {name} has to treat them one by one. One that "
            f"takes norms or sums over all of them needs strategy ddp or {option_advice('intra_node', 'collectives')}"
        )
    return None
