# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`HostWeight`: one weight in host memory of which the device has one slice at a time, and the next one on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from accelerate_lshdp.engine.stores.shared.sliced_layout import slices_of
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight
from accelerate_lshdp.engine.stores.streamed.masters import require_followable, require_registered


class HostWeight(SlicedWeight):
    """A weight that the device copies slice by slice from the memory of the node.

    The memory of a slice belongs to the stream that computes with it, and the copy waits for that stream to have it;
    the slice after it is copied meanwhile. What is copied is of use until the weight changes.

    Args:
        name: of the parameter in the model.
        master: the parameter in host memory, as the optimizer has it.
        places: modules that have it, and its name in each.
        slices: in which it is copied.
        source: what is copied to the device, of the shape of the master in the precision of the forward.
        device: where the forward runs.
        copies: the stream of copies from the host.
        wait: called before anything is copied, as the optimizer may still be stepping the weight.
        take_slice: called with the index of a slice and its gradient on the device.
        take_rows: called with places of rows and their gradients; see `SlicedWeight.reduce_rows`.
        used: called when a forward uses the weight whose backward may come, with whether that is a product.
    """

    def __init__(
        self,
        name: str,
        master: nn.Parameter,
        places: Sequence[tuple[nn.Module, str]],
        slices: int,
        *,
        source: torch.Tensor,
        device: torch.device,
        copies: torch.Stream,
        wait: Callable[[], None],
        take_slice: Callable[[int, torch.Tensor], None],
        take_rows: Callable[[torch.Tensor, torch.Tensor], None],
        used: Callable[[bool], None],
    ) -> None:
        super().__init__(name, places, slices_of(master, slices), device=device)
        self._master = master
        self._trains = master.requires_grad
        self._source = source
        self._streams = torch.get_device_module(device)
        self._copies = copies
        self._wait = wait
        self._take_slice = take_slice
        self._take_rows = take_rows
        self._used = used
        #: Slices that were copied ahead: the tensor, when it is there, and the stream that its memory belongs to.
        self._ahead: dict[int, tuple[torch.Tensor, torch.Event, torch.Stream]] = {}

    @property
    def parameter(self) -> nn.Parameter:
        return self._master

    def replace(self, stand_in: torch.Tensor) -> None:
        for module, name in self.places:
            require_registered(module, name, self._master)
        require_followable(self._master, self._trains)
        if self._master._backward_hooks:
            raise RuntimeError(
                f"found hooks of register_hook on {self.name}, which is in slices, expected none: the whole of its "
                'gradient is never on the device. Give its unit "slices": 1 in the placement'
            )
        self._set(stand_in)

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._master.dtype

    @property
    def version(self) -> tuple[int, int, int]:
        # Changes in place by the script are seen where its node's memory is watched.
        return id(self._master), 0, self._steps

    # Slices

    def note_use(self, *, is_product: bool) -> None:
        self._used(is_product)

    def gather(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        if index == 0:
            self.drop()  # what an operator has left that failed; maybe in another stream
        self._fetch(index)
        gathered, arrival, home = self._ahead.pop(index)
        home.wait_event(arrival)
        if index + 1 < self.rows.count:
            self._fetch(index + 1)
        return gathered.to(dtype)

    @torch.no_grad()
    def _fetch(self, index: int) -> None:
        """Queues the copy of a slice, if it is not on its way."""
        if index in self._ahead:
            return
        self._wait()
        home = self._streams.current_stream()
        own = self._source[self.rows.own(0, index)]
        gathered = torch.empty((self.rows.gathered, *own.shape[1:]), dtype=own.dtype, device=self.device)
        gathered[len(own) :].zero_()  # products with padding must not be NaN
        # The memory may be what the computing stream has used for something else until now.
        is_free = home.record_event()
        with self._streams.stream(self._copies):
            self._copies.wait_event(is_free)
            gathered[: len(own)].copy_(own, non_blocking=True)
            self._ahead[index] = gathered, self._copies.record_event(), home

    def drop(self) -> None:
        """Drops slices that were copied ahead and not used."""
        for _, arrival, home in self._ahead.values():
            # The copy must not write to what the memory is used for next, by the stream that it belongs to.
            home.wait_event(arrival)
        self._ahead.clear()

    def will_change(self) -> None:
        super().will_change()
        self.drop()

    # Gradients

    def reduce(self, index: int, gradient: torch.Tensor) -> None:
        own = self.rows.own(0, index)
        self._take_slice(index, self._through_hooks(gradient)[: own.stop - own.start])

    def reduce_rows(self, places: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.hooks:  # which are given slices
            super().reduce_rows(places, gradient)
        else:
            self._take_rows(places, gradient)

    def own_rows(self, index: int, places: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of one slice without padding; arguments as of `reduce_rows`."""
        own = self.rows.own(0, index)
        return self.slice_of_rows(index, places, gradient)[: own.stop - own.start]
