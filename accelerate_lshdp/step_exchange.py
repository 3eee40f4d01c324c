"""The few numbers that ranks tell each other in a step, over the host so that no device has to be waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class StepExchange:
    """Small sums over all ranks (collective to make and to use).

    Args:
        rank: this process's rank.
        world_size: number of ranks; with one rank nothing is sent.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group: dist.ProcessGroup | None = None
        if world_size > 1:
            on_host = dist.get_backend() == "gloo"
            self.group = dist.group.WORLD if on_host else dist.new_group(backend="gloo")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of ``values`` (host, float64) over ranks."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def all_true(self, flag: bool) -> bool:
        """Whether ``flag`` is true on every rank."""
        return int(self.sum(torch.tensor([float(flag)], dtype=torch.float64)).item()) == self.world_size

    def after_backward(
        self, compute_seconds: float, wait_seconds: float, usages: Sequence[torch.Tensor]
    ) -> tuple[list[float], list[float], list[torch.Tensor]]:
        """Tells every rank how long each rank took, and which parameters any rank used.

        Args:
            compute_seconds, wait_seconds: of this rank, since the last optimizer step.
            usages: one tensor a model, 1 where this rank has a gradient for a parameter.

        Returns:
            Compute seconds and wait seconds, one entry a rank; and for each model how many ranks used each parameter.
        """
        times = torch.zeros(2, self.world_size, dtype=torch.float64)
        times[0, self.rank], times[1, self.rank] = compute_seconds, wait_seconds
        total = self.sum(torch.cat([times.flatten(), *usages]))
        compute, wait, *counts = total.split([self.world_size, self.world_size, *(len(u) for u in usages)])
        return compute.tolist(), wait.tolist(), counts
