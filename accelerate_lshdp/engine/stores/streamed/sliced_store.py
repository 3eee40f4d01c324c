# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A `StreamedStore` whose large embeddings and output heads are streamed slice by slice.

What is in no unit is on the device from the first operation of a forward to the last one of its backward, so large
weights of it had better not be there whole: a third of GPT-2 is its embedding, which is its head, too. Of a weight in
slices the device has one slice and the next one, of its gradient as much (`sliced_gradients`), and of the logits of a
head no more (`sliced.logits`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_lshdp.engine.stores.sliced.choice import SlicedChoice
from accelerate_lshdp.engine.stores.sliced.stand_ins import StandIns
from accelerate_lshdp.engine.stores.streamed.host_weight import HostWeight
from accelerate_lshdp.engine.stores.streamed.sliced_gradients import SlicedGradients
from accelerate_lshdp.engine.stores.streamed.store import StreamedStore


class SlicedStreamedStore(StreamedStore):
    """Parameters of a node in host memory, some of them in slices (collective to make).

    Args:
        *args: as for `StreamedStore`.
        in_slices: weights of what is in no unit, which are streamed in slices.
        **kwargs: likewise.

    Raises:
        NodeMemoryError: as for `StreamedStore`.
    """

    def __init__(self, *args: Any, in_slices: Sequence[SlicedChoice], **kwargs: Any) -> None:
        self._chosen = {id(choice.parameter): choice for choice in in_slices}
        self._weights: list[HostWeight] = []
        super().__init__(*args, in_slices=in_slices, **kwargs)

    # Setting up

    def _divide(self) -> list[list[int]]:
        return [[index for index in own if not self._is_sliced(self._everything[index])] for own in super()._divide()]

    def _parts(self) -> list[list[int]]:
        sliced = [[index] for index, parameter in enumerate(self._everything) if self._is_sliced(parameter)]
        return [*self._members, *sliced]

    def _is_sliced(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._chosen

    def _make_leaves(self) -> dict[int, torch.Tensor]:
        self._sliced = {i: SlicedGradients(pieces, self._arriving) for i, pieces in self._sliced_pieces.items()}
        self._sliced_of = {
            piece: self._sliced[index]
            for index, own in self._sliced_pieces.items()
            for piece in (*own.first, *own.last)
        }
        # First: who counts how many tensors there are in the memory of the node counts these, too.
        sources = {
            index: self._casts.get(index, self._everything[index].detach())
            for index, parameter in enumerate(self._everything)
            if self._is_sliced(parameter)
        }
        leaves = super()._make_leaves()
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        weights = [
            self._make_weight(self._everything[index], source, part, indices.get(id(self._everything[index])))
            for part, (index, source) in enumerate(sources.items(), len(self._members))
        ]
        self._stand_ins = StandIns(self.context, weights, ())
        self._weights = weights
        stand_ins = zip(weights, self._stand_ins.of, strict=True)
        self._master_of |= {id(stand_in): weight.parameter for weight, stand_in in stand_ins}
        return leaves

    def _make_weight(self, master: nn.Parameter, source: torch.Tensor, part: int, index: int | None) -> HostWeight:
        choice = self._chosen[id(master)]
        gradients = None if index is None else self._sliced[index]
        # Weakly: graphs of forwards hold the weight.
        take_slice, take_rows = weakref.WeakMethod(self._take_slice), weakref.WeakMethod(self._take_rows)
        weight = HostWeight(
            choice.name,
            master,
            choice.places,
            choice.slices,
            source=source,
            device=self._device,
            copies=self._copies,
            wait=functools.partial(self._late.wait_for, part),
            take_slice=_to_store(take_slice, index),
            take_rows=_to_store(take_rows, index),
            used=_nothing if gradients is None else gradients.used,
        )
        if gradients is not None:
            gradients.weight = weight
        return weight

    def _step_order(self) -> list[int]:
        rest, *units = self._streaming.order()
        parts = dict(enumerate(self._weights, len(self._members)))
        early = [part for part, weight in parts.items() if any(isinstance(m, nn.Embedding) for m, _ in weight.places)]
        return [rest, *early, *units, *(part for part in parts if part not in early)]

    def gradient_leaves(self) -> Iterator[torch.Tensor]:
        yield from super().gradient_leaves()
        yield from self._stand_ins.of

    # One backward

    def begin(self, synchronise: bool) -> None:
        super().begin(synchronise)
        self._stand_ins.replace()  # for activations that are computed again

    def _take_slice(self, index: int, number: int, gradient: torch.Tensor) -> None:
        self.context.mark_used(index)
        if not self.context.state.in_backward:
            return  # of a backward of the script's own
        self._require_open(index, number)
        self._arriving.computed_here()
        piece = self._sliced[index].add_slice(number, gradient)
        if piece is None:
            return
        total, handed_in = self._sliced[index].take(piece), self._gradients[piece]
        if handed_in is not None:  # by a product whose bucket waits for those before it
            self._gradients[piece] = None
            total = self._sliced[index].sum_of([handed_in, total])
        self._take_piece(piece, total)

    def _take_rows(self, index: int, places: torch.Tensor, gradient: torch.Tensor) -> None:
        self.context.mark_used(index)
        if self.context.state.in_backward:
            self._require_open(index, 0)
            self._arriving.computed_here()
            self._sliced[index].add_rows(places, gradient)

    def _require_open(self, index: int, number: int) -> None:
        """Raises RuntimeError if a gradient was handed in already to which there is something to add."""
        own = self._sliced[index]
        if self._bucket_of[own.pieces.last[number]] in self._delivered:
            raise RuntimeError(
                f"found another gradient of {own.weight.name}, which is in slices, after those that its forwards had "
                "shown were sent, expected each forward to have one backward. Call accelerator.backward once for each "
                'forward, or give the unit of the weight "slices": 1 in the placement'
            )

    def _is_complete(self, number: int) -> bool:
        piece = self._layout[number][0]  # a slice is alone in its bucket
        if piece not in self._sliced_of:
            return super()._is_complete(number)
        return bool(self._filled[number]) or not self._sliced_of[piece].may_come(piece)

    def _complete(self, number: int) -> None:
        for piece in self._layout[number]:
            if piece in self._sliced_of and piece not in self._filled[number]:
                self._gradients[piece] = self._sliced_of[piece].take(piece)
                self._arriving.computed_here()

    def finish(self) -> None:
        self._end_backward()
        super().finish()

    def cancel(self) -> None:
        self._end_backward()
        super().cancel()

    def abandon(self) -> None:
        self._end_backward()
        super().abandon()

    def _end_backward(self) -> None:
        self._stand_ins.restore()
        for gradients in self._sliced.values():
            gradients.backward_ends()

    # What changes the parameters

    def _stop_reading(self) -> None:
        if self._weights:  # else they could not be made
            self._stand_ins.restore()
        for weight in self._weights:
            weight.will_change()
        for gradients in self._sliced.values():
            gradients.forget_uses()
        super()._stop_reading()


def _to_store(method: weakref.WeakMethod, index: int | None) -> Callable[..., None]:
    def call(*args: Any) -> None:
        found = method()
        if found is not None and index is not None:
            found(index, *args)

    return call


def _nothing(is_product: bool) -> None:
    return
