# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`HeadCall`: one call of an output head in slices, and when its logits are computed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from accelerate_lshdp.engine.stores.sliced.head_loss import RowLosses, without_autocast
from accelerate_lshdp.engine.stores.sliced.operators import product
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


class WaitingLogits(Protocol):
    """Logits of a call, or what was made of them, without values so far."""

    call: HeadCall

    def is_held(self, but_for_references: int = 0) -> bool:
        """Whether something holds this object, so that it cannot become its values."""

    def become_values(self) -> None:
        """Makes this object an ordinary tensor, which has no ``call``."""

    def twin(self) -> torch.Tensor:
        """Another tensor with the values."""

    @property
    def known(self) -> torch.Tensor | None:
        """The values, if something has needed them."""


class _Reference(weakref.ref):
    """A weak reference that Python does not share with a script's own, which forbids to exchange a tensor."""


class HeadCall:
    """One call of a head: what its logits are computed from.

    Args:
        x: input of the head in the precision in which it computes, shape (..., columns).
        weight: the stand-in of its weight, of shape (classes, columns).
        bias: shape (classes,).

    Attributes:
        losses: of the cross entropy that was computed of it without logits.
        notes_of_loss: what may be noted of the operation that this loss is the result of; it does not keep it alive.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.losses: list[RowLosses] = []
        self.notes_of_loss: dict[str, Any] | None = None
        self.sliced: SlicedWeight = weight.sliced
        # The bias itself has no memory where its unit is sharded again.
        self.bias_values = None if bias is None else bias.detach().clone()
        self._versions = self._versions_now()
        self._forward = self.sliced.forwards
        self._made: list[_Reference] = []
        self._has_values = False
        self._is_in_forward = True

    def _versions_now(self) -> tuple[int, ...]:
        return (*self.sliced.version, self.x._version)

    @property
    def shape(self) -> torch.Size:
        """That of its logits."""
        return torch.Size((*self.x.shape[:-1], self.sliced.shape[0]))

    @property
    def has_values(self) -> bool:
        """Whether its logits were computed."""
        return self._has_values

    @property
    def was_used(self) -> bool:
        """Whether a loss was computed of it without its logits."""
        return bool(self.losses)

    @property
    def can_wait(self) -> bool:
        """Whether a loss may still be computed of it without its logits: while the model's forward runs."""
        return self._is_in_forward and not self._has_values and not self.was_used

    def add(self, logits: WaitingLogits) -> None:
        """Takes note of logits, or a view or a copy of them, that wait."""
        self._made.append(_Reference(logits))

    def leave_forward(self) -> None:
        """Says that the model's forward has ended: what comes is the script's."""
        self._is_in_forward = False

    def settle(self) -> None:
        """Computes the logits, if no loss was computed of them (collective).

        Also if nobody can use them any more: other ranks may, and gather the weight.
        """
        if self.was_used:
            return
        if self.can_compute():
            self.compute()
        else:
            for logits in self._alive():
                logits.twin()

    def require_unchanged(self) -> None:
        """Raises RuntimeError if what the logits are computed from has changed since the call."""
        if self._versions_now() == self._versions:
            return
        what = "its input" if self._versions_now()[:-1] == self._versions[:-1] else "its weight"
        raise RuntimeError(
            f"found the logits of {self.sliced.name} in use after {what} had changed, expected it before: logits of a "
            "head in slices are not kept. Use them before (those of an output before the optimizer's step), or give "
            'the unit of the head "slices": 1 in the placement'
        )

    def compute(self) -> None:
        """Computes the logits (collective), and all that was made of them, once.

        Raises:
            RuntimeError: the weight or the input has changed since the call, other ranks do not ask for them, or
                something holds them that cannot be given their values.
        """
        if self._has_values:
            return
        made = self._alive()
        self._made.clear()  # tensors with weak references cannot be exchanged
        try:
            if any(logits.is_held() for logits in made):
                raise RuntimeError(held(self.sliced.name))
            self._compute(made)
        except BaseException:
            self._made = [_Reference(logits) for logits in made if _waits(logits)]
            raise
        self._has_values = True

    def require_unchanged_twins(self) -> None:
        """Raises RuntimeError if something has changed values of logits that cannot show it."""
        for logits in self._alive():
            logits.known  # noqa: B018 - it looks

    def can_compute(self) -> bool:
        """Whether nothing holds the logits that are to become tensors."""
        return not any(logits.is_held(but_for_references=1) for logits in self._alive())

    def _alive(self) -> list[WaitingLogits]:
        return [logits for reference in self._made if (logits := reference()) is not None]

    def _compute(self, made: list[WaitingLogits]) -> None:
        with computing():
            if not made:
                self.before_values()
                self.logits()
            # In the order in which they were made: a view is one of its parent's values.
            for logits in made:
                logits.become_values()

    def before_values(self) -> None:
        """Makes sure that the logits can be computed; raises as `compute`."""
        self.require_unchanged()
        # Other ranks may not do so: after a loss without them nothing else asks for logits.
        if self.was_used or not self._is_in_forward:
            self.sliced.read_logits(self._forward)

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """The logits without a graph (collective), shape (..., classes)."""
        with without_autocast(self.x):
            output = product(self.x, self.weight, self.x.dtype)
        return output if self.bias_values is None else output.add_(self.bias_values)


def held(name: str) -> str:
    """What is said where logits cannot become tensors, as something else holds or changes them."""
    return (
        f"found the logits of {name}, which is in slices, changed or held by a function of autograd, a weak reference "
        "or another place that takes tensors past Python, expected an operator of torch: they have no values until "
        'one needs them. Give it logits.clone(), or give the unit of the head "slices": 1 in the placement'
    )


@contextmanager
def computing() -> Iterator[None]:
    """Inside, values are computed with their graph, whatever needs them first: a metric, and then a loss."""
    with torch.inference_mode(False), torch.enable_grad():
        # What is saved here is not what checkpointing counts: when it computes again, the values are there.
        with saved_tensors_hooks(_as_it_is, _as_it_is):
            yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _waits(logits: WaitingLogits) -> bool:
    return hasattr(logits, "call")
