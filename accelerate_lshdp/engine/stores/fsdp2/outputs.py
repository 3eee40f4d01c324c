# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Outputs of units that FSDP2 does not see: it gathers a unit again, and reduces it, when an output has a gradient.

FSDP2 looks for tensors in the containers that torch knows. A model may return them in an object of its own, or leave
them in an attribute; then FSDP2 alone would train on without the gradients of what was still gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from accelerate_lshdp.engine.stores.containers import tensors_in
from accelerate_lshdp.engine.stores.sliced.logits import SlicedLogits, UsedLogits


_Hook = Callable[[torch.Tensor], torch.Tensor]


def watch_objects(module: FSDPModule) -> None:
    """Lets a unit's backward begin with the gradient of any output, whatever object of the script that is in."""
    state = module._get_fsdp_state()
    register = state._register_pre_backward_hook

    def register_all(output: Any) -> Any:
        output = register(output)
        if torch.is_grad_enabled() and not isinstance(output, torch.Tensor):
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            unseen = [tensor for tensor in tensors if not _is_watched(tensor, state._pre_backward)]
            if unseen:
                _watch(tensors, unseen, state._pre_backward)
        return output

    state._register_pre_backward_hook = register_all


def _is_watched(tensor: torch.Tensor, begin: _Hook) -> bool:
    if isinstance(tensor, SlicedLogits):
        return tensor.is_watched_by(begin)
    return begin in (tensor._backward_hooks or {}).values()


def _watch(tensors: list[torch.Tensor], unseen: list[torch.Tensor], begin: _Hook) -> None:
    beginning, of_unseen = _Beginning(begin), {id(tensor) for tensor in unseen}
    for tensor in tensors:
        if not isinstance(tensor, (SlicedLogits, UsedLogits)):
            tensor.register_hook(beginning.of_unseen if id(tensor) in of_unseen else beginning.of_seen)
        elif id(tensor) in of_unseen:
            tensor.register_hook(begin)  # these take hooks of FSDP2 alone without being computed


class _Beginning:
    """Begins the backward of one forward of a unit, once.

    A cache that all units fill is in the output of each: a gradient of what an earlier unit has put there comes when
    the later ones have gone back already, which must not gather these again.
    """

    def __init__(self, begin: _Hook) -> None:
        self._begin, self._has_begun = begin, False

    def of_seen(self, gradient: torch.Tensor) -> None:
        self._has_begun = True  # by FSDP2

    def of_unseen(self, gradient: torch.Tensor) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin(gradient)


def explain_not_gathered(error: BaseException) -> None:
    """Raises a clear error in the place of what torch says of parameters that are not gathered.

    Raises:
        RuntimeError: autograd needed some.
    """
    if isinstance(error, RuntimeError) and "out of bounds for storage of size 0" in str(error):
        raise RuntimeError(
            "found a backward through a block whose parameters were not gathered again: no output that its forward "
            "returned had a gradient, as when a model leaves outputs in an attribute, or changes them in place. "
            "Return what leads to the loss, in any object or container, or let the plan keep the block whole: "
            'strategy "ddp" or "zero2", or a placement of "replicate" or "world_kept"'
        ) from error


class Completion:
    """Whether FSDP2 has completed the backward of a model, which it does only if it saw a gradient of an output.

    Args:
        modules: those of the model that FSDP2 shards.
    """

    def __init__(self, modules: list[FSDPModule]) -> None:
        self._is_complete = True
        states = [module._get_fsdp_state() for module in modules]
        self._complete: Callable[[], None] | None = states[0]._root_post_backward_final_callback if states else None
        for state in states:
            state._root_post_backward_final_callback = self._noting(state._root_post_backward_final_callback)

    def _noting(self, complete: Callable[[], None]) -> Callable[[], None]:
        def completed() -> None:
            self._is_complete = True
            complete()

        return completed

    def backward_begins(self) -> None:
        """Notes that autograd is about to run."""
        self._is_complete = False

    def complete(self) -> None:
        """Reduces what is left, after autograd; a collective if FSDP2 has not done it."""
        if not self._is_complete and self._complete is not None:
            self._is_complete = True
            self._complete()
