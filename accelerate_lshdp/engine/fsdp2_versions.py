# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What FSDP2 can do in some versions of torch only, done for all that the package accepts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """What is gathered and reduced together of a module's parameters; before torch 2.12 that is one group at most."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reduce_unused_parameters(root: FSDPModule) -> None:
    """Parameters that this rank's backward did not use are reduced with the others, as zeros (torch 2.13 can do that).

    Other ranks send a gradient for them.
    """
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                _fill_in_zeros(group)


def _fill_in_zeros(group: FSDPParamGroup) -> None:
    reduce = group.post_backward

    def post_backward(*unused: object) -> None:
        if group.reduce_grads:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)  # there is none before the first forward
                has_gradient = whole is None or whole.grad is not None or not whole.requires_grad
                if not has_gradient and parameter.unsharded_accumulated_grad is None:
                    whole.grad = torch.zeros_like(whole)
        reduce(*unused)

    group.post_backward = post_backward


def forget_iteration(root: FSDPModule) -> None:
    """After a forward or a backward that was given up: the next forward begins anew (torch 2.13 can do that).

    Parameters are sharded, and gradients that were on their way are lost.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()
    state._device_handle.synchronize()  # what is under way uses buffers that are freed here
    communication, iteration = state._comm_ctx, state._state_ctx
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):  # torch 2.12
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for one in iteration.all_states:
        one._modules_to_run_forward.clear()
        one._training_state = TrainingState.IDLE
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                _forget(group)
    iteration.iter_forward_root = None
    iteration.post_backward_final_callback_queued = False


def _forget(group: FSDPParamGroup) -> None:
    gathered = group._all_gather_result
    if gathered is not None and isinstance(gathered.all_gather_work, dist.Work):
        gathered.all_gather_work.wait()
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()
