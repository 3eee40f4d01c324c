# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Chooses torch's fused optimizer kernels on CPUs.

Left to itself torch steps parameter by parameter there, with a pass over memory for each operation; its fused
kernels do the same arithmetic in one pass (AdamW of 14 M parameters: a third of the time). The step is part of what
the slowest rank keeps the others waiting for.
"""

from __future__ import annotations

import torch


#: Optimizers of which torch has fused kernels for CPUs. Subclasses may compute something else.
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
#: Those that take DTensors.
_FUSED_ON_SHARDS = (torch.optim.Adam, torch.optim.AdamW)


def fuse_steps(optimizer: torch.optim.Optimizer, is_sharded: bool = False) -> int:
    """Lets an optimizer on the CPU use its fused kernels in the groups where the script left the choice to torch.

    Groups that ask for ``foreach``, ``fused``, ``capturable`` or ``differentiable``, hold a learning rate as a tensor,
    or parameters elsewhere or of a dtype that the kernels lack, stay as they are.

    Args:
        optimizer: before its first step.
        is_sharded: whether its parameters are, or will be, DTensors.

    Returns:
        The number of groups changed.
    """
    if type(optimizer) not in (_FUSED_ON_SHARDS if is_sharded else _FUSED_ON_CPU):
        return 0
    changed = 0
    for group in optimizer.param_groups:
        undecided = group.get("foreach") is None and group.get("fused") is None
        special = any(group.get(name) for name in ("capturable", "differentiable"))
        special = special or isinstance(group.get("lr"), torch.Tensor)
        dtypes = (torch.float32, torch.float64)
        # 0-dimensional parameters of a sharded model stay whole; torch steps no mixed group in one go.
        special = special or (is_sharded and any(p.ndim == 0 or p.numel() == 0 for p in group["params"]))
        fits = all(p.device.type == "cpu" and p.dtype in dtypes for p in group["params"])
        if undecided and not special and fits and group["params"]:
            group["fused"] = True
            changed += 1
    return changed
