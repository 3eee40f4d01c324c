# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`BackwardState`: how far the backward of a model is on this rank, and which parameters it has reached."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from accelerate_lshdp.engine.local_gradients import LocalGradients
from accelerate_lshdp.runtime.heap_bound import HeapBound


class BackwardState:
    """What a model and its stores know of its backward on this rank.

    Attributes:
        in_backward: whether a backward was begun and not finished.
        bypassed: whether autograd produced gradients outside of one.
        is_alone: whether it is the only model of the backward: then ranks wait for nothing between autograd and
            `Flow.deliver`.
        reached: whether autograd produced gradients for the model on this rank since the last one was begun.
        took_part: the same, and on any rank once ranks have told each other.
        local: the gradients that this rank holds alone.
        heap: looked at as gradients are made, and before units are gathered. None: on devices, or where the user has
            tuned the C library.
    """

    def __init__(self) -> None:
        self.heap: HeapBound | None = None
        self.in_backward = False
        self.bypassed = False
        self.is_alone = True
        self.reached = self.took_part = False
        self.local = LocalGradients()
        self._used: set[int] = set()
        self._reported = False

    def mark_used(self, index: int) -> None:
        """Takes note that autograd has produced a gradient for trainable parameter ``index`` on this rank."""
        # Else it is a loss.backward() of the script; its gradients are of this rank alone, and `before_step` of the
        # model refuses them.
        if not self.in_backward:
            self.bypassed = True
        self.reached = self.took_part = True
        self._used.add(index)
        self.check_heap()

    def check_heap(self) -> None:
        """Says that memory was allocated and freed."""
        # Not while a model is compiled: its graph has no place for it.
        if self.heap is not None and not torch.compiler.is_compiling():
            self.heap.check()

    def begin(self, parameters: Sequence[nn.Parameter], has_gradients: bool) -> None:
        """Begins a backward.

        Args:
            parameters: all trainable ones.
            has_gradients: whether the rank holds gradients of any, final or not.
        """
        if not has_gradients:
            self._used.clear()  # dropped in the middle of a step, or by a backward that has failed
        # Gradients that the script has set to None since the last report are not used any more. Only after a report:
        # before it, gradients that are still to be summed may be elsewhere than in .grad.
        if self._reported:
            self._used = {index for index in self._used if parameters[index].grad is not None}
            self._reported = False
        self.in_backward, self.reached, self.took_part = True, False, False

    def report(self, count: int) -> torch.Tensor:
        """To which trainable parameters' gradients this rank has contributed: 0/1, shape (count,), float64."""
        # Ranks tell each other of these with the step's report, in a byte or in bits (`ToldUsage`).
        usage = torch.zeros(count, dtype=torch.float64)
        if self._used:
            usage[sorted(self._used)] = 1
        self._reported = True
        return usage
