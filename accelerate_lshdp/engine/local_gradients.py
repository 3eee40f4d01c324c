# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients of one rank alone: ``model.no_sync()``, and optimizer steps that are made with them.

Most steps inside ``no_sync`` are the first micro-batches of a step whose last backward sums over all ranks. LocalSGD
steps with what is there: every rank by itself, on whole parameters of its own, which it averages now and then.
"""

from __future__ import annotations

import torch


class LocalGradients:
    """How much the losses count whose gradients a rank holds, not summed with those of the others.

    A loss is weighted by what it is of the global batch, so that the sum over all ranks is right. A step of one rank
    alone should be of the mean loss of its own batch: there every rank counts as if batches were equal.
    """

    def __init__(self) -> None:
        self.held = False
        self._weight = self._alone = 0.0

    def begin(self, has_gradients: bool) -> None:
        """A backward begins, of a model that has gradients already or none: ``zero_grad`` has dropped them."""
        if not has_gradients:
            self.clear()

    def add(self, weight: float, alone: float) -> None:
        """A backward has added gradients of a loss that counts by ``weight``, and in equal batches by ``alone``."""
        self.held = True
        self._weight += weight
        self._alone += alone

    def clear(self) -> None:
        """The gradients were summed over all ranks, used, or dropped."""
        self.held = False
        self._weight = self._alone = 0.0

    def rescale_for_local_step(
        self, gradients: list[torch.Tensor], inside_no_sync: bool, may_step_alone: bool
    ) -> None:
        """Makes gradients that are held those of the rank's own mean loss, for a step that it makes alone.

        Args:
            gradients: that the step is made with.
            inside_no_sync: whether the step is made there, which says that it is meant so.
            may_step_alone: whether the rank has the parameters for itself.

        Raises:
            RuntimeError: it is not meant so, or the rank has not.
        """
        if not inside_no_sync:
            raise RuntimeError(
                "found gradients at optimizer.step() that were not summed over the ranks: the forward of the last "
                "backward was inside no_sync(), or the last backward of the step did not reach the model. Let the "
                "last micro-batch before a step be outside no_sync(), with a loss of every model that is stepped"
            )
        if not may_step_alone:
            raise RuntimeError(
                "found an optimizer.step() inside no_sync(), as LocalSGD makes it, with gradients of this rank alone, "
                "but ranks share the parameters. Use strategy ddp, under which every rank has its own; or step "
                "outside no_sync(), after a backward that sums the gradients"
            )
        if self._weight not in (0.0, self._alone):
            torch._foreach_mul_(gradients, self._alone / self._weight)
        self.clear()
