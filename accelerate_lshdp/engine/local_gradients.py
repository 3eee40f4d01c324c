# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients that were not summed over ranks (``model.no_sync()``), and optimizer steps that are made with them.

Most steps inside ``no_sync`` are the first micro-batches of a step whose last backward sums over all ranks. LocalSGD
steps with what is there: every rank by itself, on whole parameters of its own, which it averages now and then.
"""

from __future__ import annotations

import torch


class LocalGradients:
    """The summed weights of the losses whose gradients a rank holds and has not summed with those of other ranks.

    A loss is weighted by its share of the global batch, so that the sum over all ranks is right. A step that one rank
    makes by itself should be of the mean loss of its own batch: it needs the weight that equal batches would have.

    Attributes:
        held: whether the rank holds such gradients.
    """

    def __init__(self) -> None:
        self.held = False
        self._weight = self._equal_weight = 0.0

    def begin(self, has_gradients: bool) -> None:
        """Begins a backward of a model that has gradients already, or none, if ``zero_grad`` has dropped them."""
        if not has_gradients:
            self.clear()

    def add(self, weight: float, equal_weight: float) -> None:
        """Counts a backward that has added gradients.

        Args:
            weight: what its loss was multiplied with.
            equal_weight: what it would have been multiplied with if all ranks had equal batches.
        """
        self.held = True
        self._weight += weight
        self._equal_weight += equal_weight

    def clear(self) -> None:
        """Forgets the weights: the gradients were summed over all ranks, used, or dropped."""
        self.held = False
        self._weight = self._equal_weight = 0.0

    def rescale_for_local_step(
        self, gradients: list[torch.Tensor], inside_no_sync: bool, may_step_alone: bool
    ) -> None:
        """Rescales gradients of one rank to those of the mean loss of its own batch, for a step that it makes alone.

        Args:
            gradients: those that the step is made with; they are changed in place.
            inside_no_sync: whether the step is made inside ``no_sync``, which says that it is meant for this rank.
            may_step_alone: whether the rank has whole parameters of its own.

        Raises:
            RuntimeError: the step is outside ``no_sync``, or ranks share the parameters.
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
        # A weight of 0 is that of a rank without a sample, whose gradients are zeros. Equal weights need no rounding.
        if self._weight not in (0.0, self._equal_weight):
            torch._foreach_mul_(gradients, self._equal_weight / self._weight)
        self.clear()
