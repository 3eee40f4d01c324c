# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients that FSDP2 holds between the micro-batches of a step: whole, of one rank, and not in ``.grad``.

So what clears ``.grad`` does not reach them.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from accelerate_lshdp.engine.prepared import PreparedModel


def holds_unsummed(fsdp_param: FSDPParam) -> bool:
    """Whether there is a gradient of this parameter that was not summed over the ranks."""
    whole = getattr(fsdp_param, "_unsharded_param", None)  # there is none before a first forward
    return fsdp_param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def drop_unsummed(fsdp_param: FSDPParam) -> None:
    """Drops the gradient of this parameter that was not summed over the ranks, if there is one."""
    # FSDP2 keeps it in either place: apart, where it was accumulated in fp32, else in .grad of the whole parameter.
    fsdp_param.unsharded_accumulated_grad = None
    if hasattr(fsdp_param, "_unsharded_param"):
        fsdp_param._unsharded_param.grad = None


class ZeroGrad:
    """``zero_grad`` of a sharded module, which also drops what was not summed yet: torch's own does not reach that."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, set_to_none: bool = True) -> None:
        module = self._module()
        type(module).zero_grad(module, set_to_none)
        prepared = PreparedModel.of(module)
        if prepared is not None and prepared.local.held:
            prepared.drop_unsummed()
