"""Loss scaling in fp16 for sharded gradients: an overflow on one rank skips the step on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


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
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                    if not allow_fp16 and local.dtype == torch.float16:
                        raise ValueError("gradients are fp16; keep parameters in fp32 and compute in fp16")
                    local.mul_(inv_scale.to(local.device))
                    overflow += (~torch.isfinite(local)).any().to(overflow.device)
        # Unconditionally, also by ranks without a gradient: which rank overflows differs, so all have to take part.
        if dist.is_initialized():
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        return {overflow.device: overflow.clamp(max=1.0)}
