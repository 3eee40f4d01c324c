# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How an accelerator follows the optimizers that it prepared: their steps, and gradients that they drop or skip."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer


if TYPE_CHECKING:
    from accelerate_lshdp.accelerator.preparing import Preparing


class StepHook:
    """A hook of an optimizer that calls a method of the accelerator without keeping it alive: dropped, it is freed."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        method = self._method()
        if method is None:
            raise RuntimeError(
                "the accelerator that prepared this optimizer is gone; keep it as long as you use what it prepared"
            )
        return method(*args)

    @staticmethod
    def followers(optimizer: torch.optim.Optimizer) -> Iterator[Preparing]:
        """The accelerators that follow an optimizer's steps; none those of a copy, which has no hooks."""
        for hook in optimizer._optimizer_step_post_hooks.values():
            method = hook._method() if isinstance(hook, StepHook) else None
            if method is not None:
                yield method.__self__

    @staticmethod
    def remove_from(optimizer: torch.optim.Optimizer) -> None:
        """Takes off those of all accelerators, also of ones that are gone."""
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, StepHook)]:
                del hooks[key]


class PreparedOptimizer(AcceleratedOptimizer):
    """What ``prepare`` returns for an optimizer: accelerate's, and what it does to gradients is told."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        # With fp16 an overflow skips the optimizer's own step, and its hooks with it.
        if self.gradient_state.sync_gradients and self.step_was_skipped:
            for accelerator in StepHook.followers(self.optimizer):
                accelerator._step_skipped(self.optimizer)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:  # else it has done nothing
            for accelerator in StepHook.followers(self.optimizer):
                accelerator._gradients_dropped(self.optimizer)
