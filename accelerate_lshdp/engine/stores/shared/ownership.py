# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which rank of a node updates a parameter that the node shares, and optimizers that work with such parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


def hide_unowned_gradients(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Sets ``.grad`` to None on parameters that another rank of the node updates, so that the optimizer skips them.

    Returns:
        Parameters and gradients to restore after the step.
    """
    hidden = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ownership = NodeOwnership.of(parameter)
            if ownership is not None and not ownership.owned and parameter.grad is not None:
                hidden.append((parameter, parameter.grad))
                parameter.grad = None
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
