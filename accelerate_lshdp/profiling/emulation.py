# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Slowdown`: emulates a slower machine on a fast one by sleeping, for demonstrations and tests.

After each piece of its own work a slowed rank sleeps (factor - 1) times as long as that piece took. The sleep is real
time, grows with the number of samples as the work does, and contains nothing of the network: time that the rank
waits for others is not stretched. Results are unchanged to the bit.

Sleeping piece by piece, and not once a micro-batch, is what makes it resemble a slow machine where ranks meet within
the forward and backward (sharded parameters are gathered module by module).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from accelerate_lshdp.runtime.wait_clock import waited_seconds


class Slowdown:
    """Makes the training forward and backward of modules take ``factor`` times as long on this rank.

    Evaluation (modules in eval mode) keeps its speed. The backward of a module of which no input needs a gradient (the
    first one of a model, usually small) keeps it too: there is no point in autograd at which it has ended.

    Args:
        modules: the pieces, for example a model's blocks; none inside another. Work outside of them is not slowed.
            They may be prepared before or afterwards, and are to be called once a micro-batch each.
        factor: multiple of their own seconds that they take, at least 1.
        device: the device that they run on, which is synchronised at both ends of each piece. None: the CPU.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.

    Raises:
        ValueError: a factor below 1, or a module inside another.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        factor: float,
        *,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 1 <= factor < float("inf"):
            raise ValueError(f"found a slowdown of {factor}, expected at least 1: a rank cannot be made faster")
        pieces = list(modules)
        for one, other in combinations(pieces, 2):
            if any(module is other for module in one.modules()) or any(module is one for module in other.modules()):
                raise ValueError("found a module inside another, expected separate ones: it would be slowed twice")
        self.factor = factor
        self.slept = 0.0
        self._device = device
        self._clock = clock
        self._sleep = sleep
        self._owed = 0.0
        self._begun = 0.0
        self._in_backward: nn.Module | None = None
        # Innermost, whether the pieces are prepared before or after: FSDP2 gathers in a pre-hook that comes first and
        # waits in the backward of what its later hook returns.
        self._handles = [
            handle
            for piece in pieces
            for handle in (
                piece.register_forward_pre_hook(self._forward_begins, with_kwargs=True),
                piece.register_forward_hook(self._forward_ends, prepend=True),
            )
        ]

    def remove(self) -> None:
        """Removes all hooks, so that the modules run at their own speed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward_begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        if not module.training:
            return None
        args, kwargs = _mark((args, kwargs), self._stretch)
        self._in_backward = None
        self._begun = self._now()
        return args, kwargs

    def _forward_ends(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if not module.training:
            return None
        self._stretch()
        return _mark(output, lambda: self._backward_begins(module))

    def _backward_begins(self, module: nn.Module) -> None:
        if self._in_backward is not module:  # of several outputs the first counts
            self._in_backward = module
            self._begun = self._now()

    def _stretch(self) -> None:
        """Sleeps (factor - 1) times the seconds since the present piece of work began or was last stretched."""
        self._owed += (self.factor - 1) * (self._now() - self._begun)
        before = self._clock()
        if self._owed > 0:
            self._sleep(self._owed)
        # The system wakes sleepers a little late; the excess is subtracted from the next sleep.
        slept = self._clock() - before
        self._owed -= slept
        self.slept += slept
        self._begun = before + slept - waited_seconds()

    def _now(self) -> float:
        if self._device is not None and self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return self._clock() - waited_seconds()  # a rank may wait for others in the middle of a piece of work


class _Boundary(torch.autograd.Function):
    """An identity (copy) in the autograd graph that calls a function when the backward reaches it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, when_passed: Callable[[], None]) -> torch.Tensor:
        ctx.when_passed = when_passed
        return tensor.clone()  # not a view: code behind may write into it in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.when_passed()
        return gradient, None


def _mark(tree: Any, when_passed: Callable[[], None]) -> Any:
    def mark(tensor: torch.Tensor) -> torch.Tensor:
        return _Boundary.apply(tensor, when_passed) if tensor.requires_grad else tensor

    return tree_map_only(torch.Tensor, mark, tree)
