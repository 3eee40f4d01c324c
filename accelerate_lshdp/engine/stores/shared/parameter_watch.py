# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Detects changes of parameters that the ranks of a node share by anything but their optimizer.

In a run of separate copies a script may change them on one rank (average weights for an evaluation on the main
process) or on all (clipping, a momentum encoder). On shared ones every rank would see the first while it computes, and
the second would be made once a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from accelerate_lshdp.engine.stores.shared.node_ranks import NodeRanks
from accelerate_lshdp.runtime.option_advice import option_advice


#: Numbers looked at in each parameter.
_SAMPLES = 8


class ParameterWatch:
    """Compares parameters with their noted state: their addresses, torch's counters of changes, and some values.

    Counters tell of every change by this rank, except through ``.data``; values of that and of other ranks' changes,
    if they meet one of a few numbers spread over the parameter.

    Args:
        parameters: trainable and frozen ones, in shared memory.
        words: all of that memory, as int32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], words: torch.Tensor) -> None:
        self._parameters = list(parameters)
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self._words = words
        self._places, self._owners = sampled_places(self._parameters, words)
        self._versions: list[int] | None = None
        self._values: torch.Tensor | None = None
        self.note()

    def note(self) -> None:
        """Notes the state of the parameters as they are now."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._values = self._words[self._places]

    def forget(self) -> None:
        """Makes the next check note the state that it finds, as other ranks may still be changing parameters now."""
        self._values = None

    def check(self) -> None:
        """Compares the parameters with their noted state.

        Raises:
            RuntimeError: a parameter was changed or moved.
        """
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            raise RuntimeError(
                "found a parameter that lies elsewhere than prepare() put it. The ranks of a node share their "
                "parameters, so leave them there: convert the model (.to(), .half(), ...) before prepare(), and set "
                "values with load_state_dict"
            )
        if self._values is None:
            self.note()
            return
        # As integers: NaN, which differs from itself, is no change; and 0.0 and -0.0 are different bits.
        changed = [parameter._version for parameter in self._parameters] != self._versions
        if changed or not torch.equal(self._words[self._places], self._values):
            self.refuse()

    def is_changed_here(self) -> bool:
        """Whether this rank itself has changed a parameter since their state was noted; not through ``.data``."""
        noted = self._values is not None
        return noted and [parameter._version for parameter in self._parameters] != self._versions

    def refuse(self) -> NoReturn:
        """Raises the error of a parameter that was changed."""
        raise RuntimeError(self._message())

    def _message(self) -> str:
        differs = set(self._owners[self._words[self._places] != self._values].tolist())
        for index, (parameter, version) in enumerate(zip(self._parameters, self._versions, strict=True)):
            if parameter._version != version:
                differs.add(index)
        found = [tuple(self._parameters[index].shape) for index in sorted(differs)]
        return (
            f"found {len(found)} parameters changed outside their optimizer (the first of shape {found[0]}), by this "
            "rank or by another one of its node. They share their parameters: a change is seen by all while they "
            "compute, and one that every rank makes is made once a rank. Work on a copy of the model, use "
            f"load_state_dict on all ranks to set values, or use {option_advice('strategy', 'ddp')}. With"
            f" {option_advice('intra_node', 'collectives')} each rank has its part of a parameter alone"
        )


def refuses_changes(watch: ParameterWatch, ranks: NodeRanks) -> Callable[..., None]:
    """A hook of state dicts that raises an error if several ranks of the node have changed parameters by hand.

    Each of them has made the change, and no forward may follow any more that would find it, after the last epoch say.
    What one rank alone has changed is right: the main process that takes over averaged weights, and saves them. Of
    other ranks it is known if they have read a state, too, or called a collective (``wait_for_everyone``).

    Args:
        watch: of the parameters.
        ranks: of the node.
    """

    # A function, as copies of a module know hooks of this package by their module; and of what is not the store, which
    # the module would keep alive.
    def before_state_dict(module: nn.Module, prefix: str, *_: Any) -> None:
        if not prefix and watch.is_changed_here():  # with a prefix, the module around it was asked
            ranks.publish_change()
            if ranks.others_have_changed():
                watch.refuse()

    return before_state_dict


def sampled_places(tensors: Sequence[torch.Tensor], words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the words to compare, spread evenly over each tensor, and the tensor's index for each word.

    Args:
        tensors: in the memory of the words.
        words: of the node's memory, as int32.
    """
    nothing = torch.zeros(0, dtype=torch.long)  # there may be no tensors, as where all parameters are frozen
    places, owners = [nothing], [nothing]
    for index, tensor in enumerate(tensors):
        count = tensor.numel() * tensor.dtype.itemsize // words.dtype.itemsize
        first = (tensor.data_ptr() - words.data_ptr()) // words.dtype.itemsize
        if tensor.numel():
            chosen = torch.linspace(0, max(count - 1, 0), _SAMPLES, dtype=torch.float64).long().unique() + first
            places.append(chosen)
            owners.append(torch.full_like(chosen, index))
    return torch.cat(places), torch.cat(owners)
