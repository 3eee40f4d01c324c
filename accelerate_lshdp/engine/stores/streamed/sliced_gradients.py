# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How the gradient of a weight in slices comes into the buckets of the node without being whole on a device.

Each slice of it has a bucket (`shared.sliced_layout`). That of an output head is handed in as soon as the backward has
computed it. Gradients of an embedding are those of some rows: they wait as they are, and are made slices one by one
when the backward has ended. Only what a weight's second product adds waits as it is: one gradient, added up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from accelerate_lshdp.engine.stores.shared.sliced_layout import SlicedPieces
from accelerate_lshdp.engine.stores.streamed.gradients import DeviceGradients
from accelerate_lshdp.engine.stores.streamed.host_weight import HostWeight


class SlicedGradients:
    """The gradients of one weight in slices in a backward, as far as they are not in buckets.

    Args:
        pieces: of the gradient.
        arriving: knows the streams that compute gradients.

    Attributes:
        weight: whose they are; set when it is made.
    """

    weight: HostWeight

    def __init__(self, pieces: SlicedPieces, arriving: DeviceGradients) -> None:
        self.pieces = pieces
        self._arriving = arriving
        # By forwards since the weight has changed.
        self._has_products = self._has_rows = False
        self._products = 0  # whose gradients have not come in a backward that has ended
        self._came = 0  # products whose gradients have come in this backward
        self._slices: dict[int, torch.Tensor] = {}
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def used(self, is_product: bool) -> None:
        """Takes note that a forward uses the weight, in a product or as rows, and may have a backward."""
        if is_product:
            self._has_products = True
            self._products += 1
        else:
            self._has_rows = True

    def may_come(self, piece: int) -> bool:
        """Whether a piece may still be handed in before the backward ends."""
        if piece in self.pieces.first:
            return self._has_products
        # Those of a weight of several uses are at the end, where nothing waits for them. The slices of a product come
        # one after the other.
        return bool(self.pieces.first) or self._has_products or self._has_rows or self._came > 0

    def add_slice(self, index: int, gradient: torch.Tensor) -> int | None:
        """Adds the gradient of a slice of a product.

        Returns:
            The piece that is to be taken and handed in now; None: there may be more to come.
        """
        self._came += index == 0  # each product's slices come one after the other, from the first one on
        if self._came == 1 and self.pieces.first and self._has_products:
            self._slices[index] = gradient
            return self.pieces.first[index]
        known = self._slices.get(index)
        self._slices[index] = gradient if known is None else self.sum_of([known, gradient])
        is_last = self._came >= self._products and not self._has_rows
        return self.pieces.last[index] if is_last and not self.pieces.first else None

    def add_rows(self, places: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds the gradients of single rows; see `SlicedWeight.reduce_rows`."""
        self._rows.append((places, gradient))

    def take(self, piece: int) -> torch.Tensor | None:
        """Hands out what there is for a piece, computed in the current stream or before; None: nothing.

        Args:
            piece: one that `add_slice` has returned; or any other one, when the backward has ended.
        """
        is_first = piece in self.pieces.first
        index = (self.pieces.first if is_first else self.pieces.last).index(piece)
        product = self._slices.pop(index, None)
        parts = [] if product is None else [product]
        if is_first or not self._rows:
            return product
        self._wait_for_all()
        parts += [self.weight.own_rows(index, *each) for each in self._rows]
        self._keep(itertools.chain(*self._rows))
        return self._sum(parts)

    def sum_of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A sum in the precision of the weight, computed in the current stream from gradients of any."""
        self._wait_for_all()
        return self._sum(parts)

    def _sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = parts[0].to(self.weight.reduce_dtype, copy=True)
        for part in parts[1:]:
            total.add_(part)
        self._keep(parts)
        return total

    def _wait_for_all(self) -> None:
        """Lets the current stream wait for all gradients so far: a script may compute its forwards in several."""
        for event in self._arriving.note():
            self._current_stream().wait_event(event)

    def _keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keeps the memory of tensors until the current stream has read it; it may be that of another one."""
        for tensor in tensors:
            tensor.record_stream(self._current_stream())

    def _current_stream(self) -> torch.Stream:
        return torch.get_device_module(self.weight.device).current_stream()

    def backward_ends(self) -> None:
        """Forgets a backward that has ended, or was given up."""
        self._products = max(0, self._products - self._came)
        self._came = 0
        self._slices.clear()
        self._rows.clear()

    def forget_uses(self) -> None:
        """Takes note that no forward before this has a backward any more, as the weight changes."""
        self._has_products = self._has_rows = False
        self._products = 0
