# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Parameters of a sharded model that cannot be cut: numbers (CLIP's ``logit_scale``) and empty ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from accelerate_lshdp.runtime.profiler_labels import label
from accelerate_lshdp.runtime.wait_clock import WaitClock


def without_shards(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those of some parameters that FSDP2 cannot shard; it has to ignore them."""
    return [parameter for parameter in parameters if _cannot_be_cut(parameter)]


class PlainParameters:
    """The parameters that every rank keeps whole, as they are single numbers: sums their gradients after a backward.

    Args:
        parameters: those that are trained, on the device where the forward runs.
        clock: counts the time spent waiting.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], clock: WaitClock) -> None:
        self.parameters = list(parameters)
        self._clock = clock
        self._earlier: list[torch.Tensor | None] = []  # gradients that were final already
        self._holds_local = False  # whether .grad is this rank's own, not yet summed

    def begin(self) -> None:
        """Begins a backward: sets final gradients aside, which must not be summed again."""
        if not self._holds_local:
            self._earlier = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None

    def finish(self, synchronise: bool) -> None:
        """Ends a backward; if ``synchronise``, sums the gradients over all ranks (collective)."""
        self._holds_local = not synchronise
        if not synchronise or not self.parameters:
            return
        # In float64 and in one message: parameters differ in dtype, and a network takes as long for one number as
        # for all. Those without a gradient send 0, as other ranks may have one.
        numbers = [p for p in self.parameters if p.numel()]
        if numbers and dist.get_world_size() > 1:
            zero = torch.zeros((), dtype=torch.float32)
            total = torch.stack([(zero if p.grad is None else p.grad).to(p.device, torch.float64) for p in numbers])
            with label("all_reduce"), self._clock.waiting():
                dist.all_reduce(total)
            for parameter, value in zip(numbers, total, strict=True):
                parameter.grad = value.to(parameter.dtype)
        self._give_back()

    def cancel(self) -> None:
        """Undoes ``begin``, as the loss did not depend on the model."""
        if not self._holds_local:
            self._give_back()

    def abandon(self) -> None:
        """Forgets a backward that failed, with the gradients that were set aside."""
        self._holds_local = False
        self._earlier = []

    def _give_back(self) -> None:
        for parameter, earlier in zip(self.parameters, self._earlier, strict=False):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad + earlier
        self._earlier = []


def _cannot_be_cut(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 0 or parameter.numel() == 0
