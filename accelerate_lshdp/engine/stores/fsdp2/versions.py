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
    """Parameters that this rank's backward did not use are reduced with the others, as zeros.

    Other ranks send a gradient for them. torch 2.13 can do that, but for gradients in low precision that have been
    accumulated in fp32: it has zeros in low precision beside those, and refuses.
    """
    groups = [group for module in root.modules() if isinstance(module, FSDPModule) for group in param_groups(module)]
    for group in {id(group): group for group in groups}.values():  # modules may share one
        _fill_in_zeros(group)


def _fill_in_zeros(group: FSDPParamGroup) -> None:
    reduce = group.post_backward

    def post_backward(*unused: object) -> None:
        if group.reduce_grads:
            # There is none before the first forward.
            used = [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]
            accumulated = [parameter for parameter in used if parameter.unsharded_accumulated_grad is not None]
            for parameter in used:
                whole = parameter._unsharded_param
                if whole.requires_grad and parameter.unsharded_accumulated_grad is None:
                    whole.grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
                    if accumulated:  # all that is reduced together has one precision
                        parameter.to_accumulated_grad_if_needed()
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
