# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Functions of FSDP2 that only some versions of torch have, for all versions that the package accepts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """The groups of a module's parameters that FSDP2 gathers and reduces together (before torch 2.12 at most one)."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reduce_unused_parameters(root: FSDPModule) -> None:
    """Lets FSDP2 reduce parameters that this rank's backward did not use with the others of their group, as zeros.

    Other ranks send a gradient for them. torch 2.13 can do that, but for gradients in low precision that have been
    accumulated in fp32: it has zeros in low precision beside those, and refuses.
    """
    groups = [group for module in root.modules() if isinstance(module, FSDPModule) for group in param_groups(module)]
    for group in {id(group): group for group in groups}.values():  # modules may share one
        _fill_in_zeros(group)


def _fill_in_zeros(group: FSDPParamGroup) -> None:
    # FSDP2 builds the buffer of a group from the gradients that exist: a rank that lacks one would send a shorter
    # buffer than the others, in a collective that needs the same size of all.
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


def keep_shards_of_node(module: FSDPModule, nodes: HSDPMeshInfo) -> None:
    """Lets a unit keep the shards of its node's copy after the forward.

    Args:
        module: sharded over the world, and resharded after the forward.
        nodes: the nodes and their ranks.
    """
    # ``fully_shard(reshard_after_forward=ranks)`` does the same, but makes two process groups for each unit, with
    # torch's time-out instead of the user's.
    for group in param_groups(module):
        group.post_forward_mesh_info = nodes
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = nodes
            # It only looks at the shape of the whole parameter.
            parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def forget_iteration(root: FSDPModule) -> None:
    """Resets FSDP2 after a forward or a backward that was given up, so that the next forward begins anew.

    Parameters are sharded afterwards, and gradients that were on their way are lost. torch 2.13 has it as
    ``reset_iter_state``; for older versions the same is done here.
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
    # Waited for, not dropped: the gather under way writes into memory that is freed with the group's results.
    gathered = group._all_gather_result
    if gathered is not None and isinstance(gathered.all_gather_work, dist.Work):
        gathered.all_gather_work.wait()
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()
