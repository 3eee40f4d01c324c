# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Loss scaling in fp16 for sharded and shared gradients: an overflow on one rank skips the step on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accelerate_lshdp.engine.clipping import node_barrier, own_gradients
from accelerate_lshdp.engine.stores.shared.table import BarrierPurpose


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's gradient scaler, with an overflow flag that is reduced over the world (maximum).

    Without that, ranks whose own shards are finite would step, and the others would not: their shards would differ in
    age.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        overflow = torch.zeros((), dtype=torch.float32, device=inv_scale.device)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            # Another rank of the node may still be looking at them as they were.
            node_barrier(parameters, BarrierPurpose.UNSCALING)
            for local in own_gradients(parameters):
                if not allow_fp16 and local.dtype == torch.float16:
                    raise ValueError("gradients are fp16; keep parameters in fp32 and compute in fp16")
                local.mul_(inv_scale.to(local.device))
                overflow += (~torch.isfinite(local)).any().to(overflow.device)
            node_barrier(parameters, BarrierPurpose.UNSCALING)
        # Unconditionally, also by ranks without a gradient: which rank overflows differs, so all have to take part.
        if dist.is_initialized():
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        return {overflow.device: overflow.clamp(max=1.0)}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer, if no gradient of any rank has overflowed."""
        # A fused optimizer would take the scale and the flag itself. Where it steps on the host and they are on a
        # device, its kernel would read their copies before they are there.
        takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        if takes_scale:
            optimizer._step_supports_amp_scaling = False
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            if takes_scale:
                optimizer._step_supports_amp_scaling = True
