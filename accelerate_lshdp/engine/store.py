# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Store`: how some or all parameters of a model are kept, and how their gradients become those of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_lshdp.engine.attachments import Attachments
from accelerate_lshdp.engine.backward_state import BackwardState
from accelerate_lshdp.runtime.wait_clock import WaitClock


@dataclass(frozen=True)
class StoreContext:
    """What a store is given of the model that it is a part of. It does not keep the `PreparedModel` alive.

    Args:
        module: the user's model.
        clock: counts seconds blocked in communication.
        state: of the model's backward.
        attachments: for the handles of all hooks that the store registers.
        first: index of the store's first trainable parameter among those of the model.
    """

    module: nn.Module
    clock: WaitClock
    state: BackwardState
    attachments: Attachments
    first: int = 0

    def mark_used(self, index: int) -> None:
        """Takes note that autograd has produced a gradient for the store's trainable parameter ``index``."""
        self.state.mark_used(self.first + index)


class Store(ABC):
    """The parameters of one model, or of some units of it, that are kept in one way.

    One backward goes ``begin(synchronise)``, autograd, ``deliver()``, ``finish()``. A backward with
    ``synchronise=False`` only adds to what this rank (or its node) has; the next one with ``synchronise=True`` reduces
    the sum of all of them. After ``finish`` of a synchronised one, ``.grad`` is final on every rank.

    Args:
        context: what the store needs of its model.

    Attributes:
        loss_multiplier: what a loss has to be multiplied with beside its share of the global batch.
        can_be_completed: whether ``deliver`` and ``finish`` may follow a backward that autograd did not finish, so
            that other ranks need not wait for this one.
        can_step_locally: whether a rank has whole parameters for itself, so that it may step with them.
        can_be_closed: whether the parameters can be given back to the script, as each rank can have them whole.
        loads_together: whether ranks load states together, as they share the parameters.
    """

    loss_multiplier: float = 1.0
    can_be_completed: bool = True
    can_step_locally: bool = False
    can_be_closed: bool = True
    loads_together: bool = False

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    @property
    def module(self) -> nn.Module:
        return self.context.module

    @property
    def clock(self) -> WaitClock:
        return self.context.clock

    @abstractmethod
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters as the optimizer sees them, in an order that is the same on all ranks."""

    # One backward

    @abstractmethod
    def begin(self, synchronise: bool) -> None:
        """Makes the store ready for autograd.

        Args:
            synchronise: whether this backward's gradients are summed over ranks, with what was not summed before.
        """

    @abstractmethod
    def deliver(self) -> None:
        """Hands in gradients that autograd did not produce on this rank but others wait for.

        It does not wait, but for those of its own that take memory until other ranks have added theirs.
        """

    @abstractmethod
    def finish(self) -> None:
        """Waits for the reductions of this backward; if it was synchronised, ``.grad`` is final afterwards."""

    @abstractmethod
    def cancel(self) -> None:
        """Undoes ``begin``, as the loss did not depend on the model."""

    @abstractmethod
    def abandon(self) -> None:
        """Forgets a backward that was begun and has failed; does not wait for other ranks."""

    # Gradients

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        """The tensors whose gradients a backward produces: the parameters as the forward has used them."""
        yield from self.trainable_parameters()

    def gathered_parameters(self) -> dict[int, nn.Parameter]:
        """The parameters as the optimizer sees them, by the ids of those that the module has while it is gathered."""
        return {}

    def has_gradients(self) -> bool:
        """Whether this rank holds gradients, final or not."""
        return any(parameter.grad is not None for parameter in self.trainable_parameters())

    def holds_gradients(self, among: Collection[int] | None = None) -> bool:
        """Whether there are gradients that would change the parameters: not those that were set to None or zero.

        Args:
            among: ids of the parameters that are asked about; None: all.
        """
        gradients = (
            p.grad for p in self.trainable_parameters() if p.grad is not None and (among is None or id(p) in among)
        )
        return any(bool(g.to_local().any() if isinstance(g, DTensor) else g.any()) for g in gradients)

    def drop_gradients(self) -> None:
        """Drops all gradients, wherever they are; never inside a backward."""
        for parameter in self.trainable_parameters():
            parameter.grad = None

    def drop_unsummed(self, parameters: Collection[int] | None = None) -> None:
        """Drops gradients that are not in ``.grad`` until they are summed; the script has cleared what is there.

        Args:
            parameters: ids of those whose gradients were dropped; None: all.
        """
        return

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank needs beside parameters, so that a resumed run has the same bits; on the CPU."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Takes what `state` has returned; of another run it is empty."""
        return

    # What happens to the parameters

    def forward_begins(self) -> None:
        """Takes note that a forward of the whole model begins."""
        return

    def before_step(self, stepping: Collection[int] | None = None) -> None:
        """Checks and prepares the parameters for an optimizer that is about to change some.

        Args:
            stepping: ids of those that it has; None: all.

        Raises:
            RuntimeError: gradients are not those of the global batch.
        """
        return

    def postpone_step(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Takes over the step of some parameters with a gradient, to be made after `after_step`.

        Args:
            optimizer: about to step, after `before_step`; it is not to step those that are returned.
        """
        return []

    def step_is_over(self) -> None:
        """Takes note that an optimizer has stepped, or has raised an error instead."""
        return

    def give_up_failed_step(self) -> None:
        """Lets parameters be read again after a step that has failed, as they are about to be replaced."""
        return

    def after_step(self) -> None:
        """Lets other ranks go on, as an optimizer has changed the parameters (collective where ranks share them)."""
        return

    def loading_begins(self, state: dict[str, Any]) -> None:
        """Prepares for ``load_state_dict`` of the model or a part of it (collective, except where ranks are apart)."""
        return

    def parameters_loaded(self) -> None:
        """Takes note that all ranks have set the parameters to the same values."""
        return

    def collective_begins(self) -> None:
        """Takes note that this rank is about to call a collective of the whole world."""
        return

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether a conversion of the whole module (``.to()``, ``.float()``, ``.cpu()``, ...) is to be left out.

        Args:
            convert: from a tensor as it is to what it shall be.

        Raises:
            RuntimeError: it is not possible with a prepared model.
        """
        return False

    def explain(self, error: BaseException) -> None:
        """Raises RuntimeError that says what an error of a backward means, if the store knows more than torch."""
        return

    def refuse_copy(self) -> None:
        """Raises RuntimeError if the module itself cannot be pickled."""
        return

    def close(self) -> None:
        """Ends the store's work, as its model was given back to the script; no rank waits for another one."""
        return
