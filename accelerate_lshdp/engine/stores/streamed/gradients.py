# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How gradients on a device come into the memory of the node: copied beside the backward, by the node's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from accelerate_lshdp.engine.stores.shared.bucket import GradientSource


class DeviceGradients(GradientSource):
    """Copies gradients from a device on a stream of their own, into the sums of the node or beside them.

    The first rank of a node, whose gradients take the place of what is there, copies them where they belong. Others
    copy them into memory of their own first, and add them from there. What has to wait too long for its turn is kept
    in host memory meanwhile (`set_aside`).

    Args:
        device: where the gradients are.
        staging: registered host memory of this rank, bytes.
    """

    def __init__(self, device: torch.device, staging: torch.Tensor) -> None:
        self._device = device
        self._streams = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._staging = staging
        self._computing: dict[torch.Stream, None] = {}  # that have computed gradients of this backward

    def begin(self) -> None:
        """Takes note that a backward begins."""
        self._computing.clear()

    def computed_here(self) -> None:
        """Takes note that a gradient is computed in the current stream, which is that of autograd's hook."""
        self._computing[self._streams.current_stream()] = None

    def note(self) -> list[torch.Event]:
        # All of them: those of one bucket may come from branches that the script computes in streams of their own.
        return [stream.record_event() for stream in {**self._computing, self._streams.current_stream(): None}]

    def is_computed(self, noted: Sequence[torch.Event]) -> bool:
        return all(event.query() for event in noted)

    def bring(
        self,
        noted: Sequence[torch.Event],
        copied: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        summed: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        # Of this thread, which begins with the first device: switching back to a stream of that one would take memory
        # of it, for every rank of the node.
        self._streams.set_device(self._device)
        self._copy(noted, list(zip(*copied, strict=True)))
        for places, batch in self._batches(zip(*summed, strict=True)):
            self._copy(noted, [(place, gradient) for place, (_, gradient) in zip(places, batch, strict=True)])
            torch._foreach_add_([view for view, _ in batch], places)

    def set_aside(
        self,
        noted: Sequence[torch.Event],
        gradients: Sequence[torch.Tensor | None],
        views: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        self._streams.set_device(self._device)
        aside = [None if own is None else torch.empty_like(view) for own, view in zip(gradients, views, strict=True)]
        pairs = [(into, own) for into, own in zip(aside, gradients, strict=True) if into is not None]
        # By way of registered memory, which the device writes to while it computes.
        for places, batch in self._batches(pairs):
            self._copy(noted, [(place, gradient) for place, (_, gradient) in zip(places, batch, strict=True)])
            torch._foreach_copy_([into for into, _ in batch], places)
        return aside

    def _copy(self, noted: Sequence[torch.Event], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies from the device, and waits for it."""
        if not pairs:
            return
        kept = []
        with self._streams.stream(self._stream):
            for event in noted:
                self._stream.wait_event(event)
            for target, gradient in pairs:
                # Made fp32 on the device, which takes no time beside the copy, and then no processor has to do it.
                kept.append(gradient.to(target.dtype))
                target.copy_(kept[-1], non_blocking=True)
            done = self._streams.Event(blocking=True)  # which does not spin while it is waited for
            done.record(self._stream)
        # Before anybody reads what was copied, and before the gradients' memory is used again: it belongs to the
        # stream that has computed them, and nothing on the device makes that one wait.
        done.synchronize()

    def _batches(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Parts of a bucket that fit this rank's memory together, each with its places there."""
        places, batch, used = [], [], 0
        for view, gradient in self._pieces(pairs):
            if used + view.nbytes > self._staging.numel():
                yield places, batch
                places, batch, used = [], [], 0
            places.append(self._staging[used : used + view.nbytes].view(view.dtype).view(view.shape))
            batch.append((view, gradient))
            used += view.nbytes
        if batch:
            yield places, batch

    def _pieces(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same places and gradients, those cut that are larger than this rank's memory."""
        for view, gradient in pairs:
            count = self._staging.numel() // view.dtype.itemsize
            if view.numel() <= count:
                yield view, gradient
            else:
                yield from zip(view.view(-1).split(count), gradient.reshape(-1).split(count), strict=True)
