# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Outputs of units that FSDP2 does not see: it gathers a unit again, and reduces it, when an output has a gradient.

FSDP2 looks for tensors in the containers that torch knows. A model may return them in an object of its own, or leave
them in an attribute; then FSDP2 alone would train on without the gradients of what was still gathered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from accelerate_lshdp.engine.autograd_task import current_task
from accelerate_lshdp.engine.stores.containers import tensors_in
from accelerate_lshdp.engine.stores.fsdp2.versions import param_groups
from accelerate_lshdp.engine.stores.sliced.logits import SlicedLogits, UsedLogits


logger = logging.getLogger(__name__)

_Hook = Callable[[torch.Tensor], torch.Tensor]
#: What torch says of parameters whose memory is gone, by the operation that needs them.
_NOT_GATHERED = ("out of bounds for storage of size 0", "its data is not allocated yet")


def watch_outputs(module: FSDPModule) -> None:
    """Lets a unit's backward begin with the gradient of any output, whatever object of the script that is in.

    Args:
        module: one of those of a unit, which share their state.
    """
    state = module._get_fsdp_state()
    register, groups = state._register_pre_backward_hook, param_groups(module)
    was_told = False

    def register_all(output: Any) -> Any:
        nonlocal was_told
        output = register(output)
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not _is_leaf(tensor)]
            unseen = [tensor for tensor in tensors if not _is_watched(tensor, state._pre_backward)]
            if unseen:
                _watch(tensors, unseen, state._pre_backward)
            if not (tensors or was_told) and any(group.post_forward_mesh_info is not None for group in groups):
                was_told = True
                _warn_of_hidden_outputs(state)
        return output

    state._register_pre_backward_hook = register_all


def _is_leaf(tensor: torch.Tensor) -> bool:
    # A parameter that a model returns is there for whoever gets it, and would keep each forward's hook.
    return not isinstance(tensor, SlicedLogits) and tensor.is_leaf


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


def _warn_of_hidden_outputs(state: FSDPState) -> None:
    if any(parameter.requires_grad for module in state._modules for parameter in module.parameters()):
        logger.warning(
            f"{type(state._modules[0]).__name__}, whose parameters are divided among ranks, returns nothing that has "
            "a gradient. If the loss depends on what it leaves in an attribute, its backward cannot gather them, and "
            "fails or ends the process: return that"
        )


class _Beginning:
    """Begins the backward of one forward of a unit, once in each backward of the script.

    A cache that all units fill is in the output of each: a gradient of what an earlier unit has put there comes when
    the later ones have gone back already, which must not gather these again.
    """

    def __init__(self, begin: _Hook) -> None:
        self._begin, self._begun_in = begin, -1

    def of_seen(self, gradient: torch.Tensor) -> None:
        self._begun_in = current_task()  # by FSDP2

    def of_unseen(self, gradient: torch.Tensor) -> None:
        if self._begun_in != current_task():
            self._begun_in = current_task()
            self._begin(gradient)


def explain_not_gathered(error: BaseException) -> None:
    """Raises a clear error in the place of what torch says of parameters that are not gathered.

    Raises:
        RuntimeError: autograd needed some.
    """
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _NOT_GATHERED):
        raise RuntimeError(
            "found a backward through a block whose parameters were not gathered again: no output that its forward "
            "returned had a gradient, as when a model leaves outputs in an attribute, or changes them in place. "
            "Return what leads to the loss, in any object or container, or let the plan keep the block whole: "
            'strategy "ddp" or "zero2", or a placement of "replicate" or "world_kept"'
        ) from error


class Completion:
    """Completes the backward of a model after autograd: what is still gathered is reduced then.

    FSDP2 would do it at the end of the backward in which it first sees the gradient of an output. It may see none, or
    the first one inside of a backward that reentrant checkpointing makes in the middle of another.

    Args:
        root: the module of the whole model.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._state = root._get_fsdp_state()

    def backward_begins(self) -> None:
        """Takes it over from FSDP2, whose units look whether it is queued already."""
        self._state._state_ctx.post_backward_final_callback_queued = True

    def complete(self, reached: bool) -> None:
        """Completes the backward, or gives it back to FSDP2 if this rank had none; collective if there was one.

        Args:
            reached: whether autograd produced gradients of the model.
        """
        context = self._state._state_ctx
        if not context.post_backward_final_callback_queued:
            return
        # Gradients may have passed through units that have none themselves.
        if reached or any(state._training_state is not TrainingState.IDLE for state in context.all_states):
            self._state._root_post_backward_final_callback()
        context.post_backward_final_callback_queued = False
