"""Loss scaling in fp16 for sharded and shared gradients: an overflow on one rank skips the step on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accelerate_lshdp.engine.clipping import node_barrier, own_gradients


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
            node_barrier(parameters)  # another rank of the node may still be looking at them as they were
            for local in own_gradients(parameters):
                if not allow_fp16 and local.dtype == torch.float16:
                    raise ValueError("gradients are fp16; keep parameters in fp32 and compute in fp16")
                local.mul_(inv_scale.to(local.device))
                overflow += (~torch.isfinite(local)).any().to(overflow.device)
            node_barrier(parameters)
        # Unconditionally, also by ranks without a gradient: which rank overflows differs, so all have to take part.
        if dist.is_initialized():
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        return {overflow.device: overflow.clamp(max=1.0)}
