# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients that an optimizer is still to step with: what a checkpoint of this moment would lose.

Scripts leave gradients behind that no step will use, too: the generator's loss of a GAN gives the discriminator some,
which are dropped before its own. So a step ends the wait of all parameters of its optimizer, and that of models it
does not update at all. If the latter are stepped with after all, that is found then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accelerate_lshdp.engine.prepared import PreparedModel


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The ids of what optimizers update."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


class UnsteppedGradients:
    """Follows gradients from the backward to the step. The models in it are the same on all ranks."""

    def __init__(self) -> None:
        self._waiting: dict[PreparedModel, set[int]] = {}  # models with gradients, and what was stepped of them
        self._passed_over: set[PreparedModel] = set()  # a step of another model has ended their wait
        self._lost: dict[PreparedModel, bool] = {}  # passed over when a checkpoint was saved: whether they still are

    def clear(self) -> None:
        """Gradients were dropped."""
        self._waiting.clear()
        self._passed_over.clear()
        self._lost.clear()

    def backward_begins(self) -> None:
        for prepared in self._lost:
            self._lost[prepared] = self._lost[prepared] and prepared.holds_gradients()

    def produced(self, models: Iterable[PreparedModel]) -> None:
        """A backward has produced gradients of these models."""
        for prepared in models:
            self._waiting[prepared] = set()
            self._passed_over.discard(prepared)

    def takes_lost(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Whether an optimizer is about to step with gradients that the last checkpoint should have had.

        Returns:
            For this rank; None, on all ranks, if there is nothing to ask the others about.
        """
        updated = parameters_of([optimizer])
        asked = [prepared for prepared in self._lost if _ids(prepared) & updated]
        if not asked:
            return None
        # Each of them, found or not: ranks must go on with the same models.
        found = [self._lost.pop(prepared) and prepared.holds_gradients(updated) for prepared in asked]
        return any(found)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or has skipped its step."""
        updated = parameters_of([optimizer])
        for prepared, stepped in list(self._waiting.items()):
            mine = _ids(prepared) & updated
            stepped |= mine
            if not mine:
                self._passed_over.add(prepared)
                del self._waiting[prepared]

    def would_be_lost(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Whether one of these optimizers, all that there are, is still to step with gradients of this rank."""
        updated = parameters_of(optimizers) if self._waiting else set()
        return any(prepared.holds_gradients(updated - stepped) for prepared, stepped in self._waiting.items())

    def saved(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """A checkpoint was saved; these are all optimizers that there are.

        Models that none of them updates are left out: nobody drops their gradients, so each later backward would wait
        for the device to see whether they are still there.
        """
        updated = parameters_of(optimizers) if self._passed_over else set()
        self._lost = {prepared: True for prepared in self._passed_over if _ids(prepared) & updated}


def _ids(prepared: PreparedModel) -> set[int]:
    return {id(parameter) for parameter in prepared.trainable_parameters()}
