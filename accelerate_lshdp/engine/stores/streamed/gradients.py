# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How gradients on a device come into the memory of the node: copied beside the backward, by the node's thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accelerate_lshdp.engine.stores.shared.bucket import GradientSource


class DeviceGradients(GradientSource):
    """Copies gradients from a device on a stream of their own, into the sums of the node or beside them.

    The first rank of a node, whose gradients take the place of what is there, copies them where they belong. Others
    copy them into memory of their own first, and add them from there.

    Args:
        device: where the gradients are.
        staging: registered host memory of this rank, bytes, as large as the largest bucket.
    """

    def __init__(self, device: torch.device, staging: torch.Tensor) -> None:
        self._device = device
        self._streams = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)
        self._staging = staging

    def note(self) -> torch.Event:
        # The stream of autograd's hook, on which the gradients of the bucket have been computed.
        return self._streams.current_stream().record_event()

    def bring(
        self,
        noted: torch.Event,
        copied: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        summed: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        # Of this thread, which begins with the first device: switching back to a stream of that one would take memory
        # of it, for every rank of the node.
        self._streams.set_device(self._device)
        staged = self._places(summed[0])
        kept = []
        with self._streams.stream(self._stream):
            self._stream.wait_event(noted)
            for target, gradient in zip([*copied[0], *staged], [*copied[1], *summed[1]], strict=True):
                # Made fp32 on the device, which takes no time beside the copy, and then no processor has to do it.
                kept.append(gradient.to(target.dtype))
                target.copy_(kept[-1], non_blocking=True)
            done = self._streams.Event(blocking=True)  # which does not spin while it is waited for
            done.record(self._stream)
        # Before anybody reads what was copied, and before the gradients' memory is used again: it belongs to the
        # stream that has computed them, and nothing on the device makes that one wait.
        done.synchronize()
        if staged:
            torch._foreach_add_(list(summed[0]), staged)

    def _places(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like some parts of one bucket, in the memory of this rank."""
        places, offset = [], 0
        for view in views:
            places.append(self._staging[offset : offset + view.nbytes].view(view.dtype).view(view.shape))
            offset += view.nbytes
        return places
