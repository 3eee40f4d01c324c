# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SlicedWeight`: one weight that is on the device one slice at a time, whatever the slices come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from accelerate_lshdp.engine.stores.sliced.rows import RowSlices


#: Forwards of which a script reads the logits, until they are computed at once; it may read some for a log alone.
_MOST_READ = 2


class WaitingCall(Protocol):
    """A call of a head whose logits may turn out not to be needed."""

    def settle(self) -> None:
        """Computes its logits, if no loss was computed of them (collective)."""

    def leave_forward(self) -> None:
        """Says that the model's forward has ended."""


class SlicedWeight(ABC):
    """A weight whose rows come to the device slice by slice.

    Args:
        name: of the parameter in the model.
        places: modules that have it, and its name in each.
        rows: which of its rows are in which slice.
        device: where the forward runs.

    Attributes:
        hooks: of its gradient, by number: each is given a slice of it, of this rank alone, and returns another one.
        waiting: while the model's forward runs, its calls as a head whose logits may not be needed. None: logits are
            computed at once.
        forwards: how many forwards of the model have begun.
    """

    def __init__(
        self, name: str, places: Sequence[tuple[nn.Module, str]], rows: RowSlices, *, device: torch.device
    ) -> None:
        self.name = name
        self.places = list(places)
        self.rows = rows
        self.device = device
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self.waiting: list[WaitingCall] | None = None
        self.forwards = 0
        self._depth = 0
        self._read = 0
        self._steps = 0

    # In its modules

    @property
    @abstractmethod
    def parameter(self) -> nn.Parameter:
        """What optimizers, state dicts and the script see."""

    def _registered(self) -> torch.Tensor:
        module, name = self.places[0]
        return module._parameters[name]

    def _set(self, tensor: torch.Tensor) -> None:
        # Not by setattr, which wants a Parameter, and which modules may have of their own.
        for module, name in self.places:
            module._parameters[name] = tensor

    @abstractmethod
    def replace(self, stand_in: torch.Tensor) -> None:
        """Puts a stand-in where the parameter is registered."""

    def restore(self) -> None:
        """Registers the parameter again."""
        self._set(self.parameter)

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The precision of the forward."""

    @property
    @abstractmethod
    def reduce_dtype(self) -> torch.dtype:
        """The precision in which gradients are summed."""

    @property
    @abstractmethod
    def version(self) -> tuple[int, int, int]:
        """What differs when the weight has changed."""

    def require_version(self, version: tuple[int, int, int]) -> None:
        """Raises RuntimeError if a backward is to gather other values than those of its forward, as autograd does."""
        if self.version != version:
            raise RuntimeError(
                f"found {self.name}, which is in slices, changed after a forward whose backward needs it, expected "
                "one weight in both: call backward before the optimizer's step, and before other values are loaded"
            )

    def will_change(self) -> None:
        """Says that an optimizer is about to change the weight, or that it is about to be loaded."""
        self._steps += 1

    # As a head, whose logits may wait

    def enter_forward(self) -> None:
        """Says that the model's forward begins: logits may wait, unless the script reads them anyway."""
        self._depth += 1
        if self._depth > 1:  # a model that calls itself: the outer forward is the one that ends last
            return
        self.forwards += 1
        self.waiting = [] if self._read < _MOST_READ else None

    def settle_logits(self) -> None:
        """Computes the logits of which the model's forward has computed no loss, as it ends (collective)."""
        if self._depth == 1:
            for call in self.waiting or ():
                call.settle()

    def leave_forward(self) -> None:
        """Says that the model's forward has ended, or was interrupted."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self.forget_forward()

    def forget_forward(self) -> None:
        """Says that no forward of the model runs, also where one was interrupted without a word."""
        self._depth = 0
        waiting, self.waiting = self.waiting, None
        for call in waiting or ():
            call.leave_forward()

    def read_logits(self, forward: int) -> None:
        """Says that a script is about to read logits that were not kept.

        Args:
            forward: the number of their forward, the same on all ranks.

        Raises:
            RuntimeError: this rank alone cannot compute them.
        """
        self._read += 1

    # Slices

    def note_use(self, *, is_product: bool) -> None:
        """Says that a forward uses the weight, in a product or as rows, and that a backward of it may come."""
        return

    def announce(self, what: str) -> None:
        """Says that this rank is about to use the weight (collective where slices are).

        Raises:
            RuntimeError: others use another one; see `CollectiveOrder.announce`.
        """
        return

    @abstractmethod
    def gather(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Brings a slice to the device (collective where ranks share it).

        Args:
            index: of the slice; they come one after the other.
            dtype: that is wanted.

        Returns:
            Shape (gathered rows, ...); padding is zeros.
        """

    @abstractmethod
    def reduce(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a slice's gradient (collective where ranks share it).

        Args:
            index: of the slice.
            gradient: of this rank's loss, shape (gathered rows, ...); of padding, anything.
        """

    def reduce_rows(self, places: torch.Tensor, gradient: torch.Tensor) -> None:
        """Takes the gradient of single rows (collective where ranks share them).

        Args:
            places: the row that each of some gradients belongs to; negative: to none. Any shape.
            gradient: of these rows, shape (..., columns).
        """
        for index in range(self.rows.count):
            self.reduce(index, self.slice_of_rows(index, places, gradient))

    def slice_of_rows(self, index: int, places: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of one slice, shape (gathered rows, columns); arguments as of `reduce_rows`."""
        slice_of, place = self.rows.find(places.clamp(min=0))
        of_slice = gradient.new_zeros(self.rows.gathered, gradient.shape[-1], dtype=self.reduce_dtype)
        wanted = (slice_of == index) & (places >= 0)
        if places.device.type == "cpu":
            return of_slice.index_add_(0, place[wanted], gradient[wanted].to(of_slice.dtype))
        # All of them, those of others as zeros: how many belong here is not known without waiting for the device.
        added = gradient.to(of_slice.dtype).masked_fill(~wanted[..., None], 0)
        return of_slice.index_add_(0, place.reshape(-1), added.reshape(-1, added.shape[-1]))

    def _through_hooks(self, gradient: torch.Tensor) -> torch.Tensor:
        for hook in self.hooks.values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient
