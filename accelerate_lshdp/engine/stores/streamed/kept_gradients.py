# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Gradients that stay on the device until the last micro-batch of a step, where it has the memory.

Then a step's gradients travel to the host once, and not once a micro-batch; and the host, which moves more bytes than
the device for adding them, adds them once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence

import torch

from accelerate_lshdp.engine.stores.streamed.gradients import DeviceGradients


logger = logging.getLogger(__name__)

#: Share of the device's memory that stays free beside them: the allocator fragments, and other micro-batches may be
#: larger than those before.
MARGIN = 0.1

#: Of all models of this process: those on one device share its memory.
_everyone: weakref.WeakSet[KeptGradients] = weakref.WeakSet()


class KeptGradients:
    """The sums of a rank's gradients over the micro-batches of a step, on its device.

    Args:
        parameters: whose gradients they are, in host memory; sums have their precision.
        device: where gradients are computed.
        arriving: knows the streams that compute gradients.
        without: indices of parameters whose gradients are never kept.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        arriving: DeviceGradients,
        *,
        without: Collection[int] = (),
    ) -> None:
        self._parameters = parameters
        self._bytes = sum(p.numel() * p.dtype.itemsize for i, p in enumerate(parameters) if i not in without)
        self._device = device
        self._streams = torch.get_device_module(device)
        self._arriving = arriving
        self._sums: dict[int, torch.Tensor] = {}
        self._computed: list[torch.Event] = []  # by the micro-batches before
        # Bytes at the last look: the device's peak so far, and sums that were kept; and the peak of all else.
        self._peak = self._kept_at_peak = self._beside = 0
        self._wants = self._has_failed = self._has_told = False
        _everyone.add(self)

    def __bool__(self) -> bool:
        return bool(self._sums)

    # Whether there is room for them

    def look(self) -> None:
        """Takes note of the peak of memory beside sums; when a backward begins or ends."""
        if not hasattr(self._streams, "max_memory_allocated"):
            return
        peak = self._streams.max_memory_allocated(self._device)
        kept = sum(total.nbytes for each in self._on_device() for total in each._sums.values())
        if peak > self._peak:
            # Whenever since the last look it was, no less than this was kept.
            self._beside = max(self._beside, peak - min(kept, self._kept_at_peak))
        # Scripts may begin a new peak.
        self._peak, self._kept_at_peak = peak, kept
        # What lies there now is known, also where another time had the peak.
        self._beside = max(self._beside, self._streams.memory_allocated(self._device) - kept)

    def fit(self) -> bool:
        """Whether the device has the memory, beside what it had in use so far and what other models keep."""
        if self._has_failed or not hasattr(self._streams, "mem_get_info"):
            return False
        free, total = self._streams.mem_get_info(self._device)
        own = free + self._streams.memory_reserved(self._device)
        if hasattr(self._streams, "get_per_process_memory_fraction"):
            own = min(own, int(total * self._streams.get_per_process_memory_fraction(self._device)))
        usable = (1 - MARGIN) * own
        others = sum(each._bytes for each in self._on_device() if each is not self and each._wants)
        self._wants = self._beside + others + self._bytes <= usable
        if not self._wants and not self._has_told:
            self._has_told = True
            logger.warning(
                f"gradients of every micro-batch are copied to the host: to keep their sums on the device takes "
                f"{self._bytes / 1e9:.2f} GB, beside {(self._beside + others) / 1e9:.2f} GB that are in use, of "
                f"{usable / 1e9:.2f} GB that can be used. Smaller micro-batches would let them stay there"
            )
        return self._wants

    def _on_device(self) -> list[KeptGradients]:
        return [each for each in _everyone if each._device == self._device]

    # The sums

    def add(self, index: int, gradient: torch.Tensor, *, keeps: bool) -> torch.Tensor:
        """The sum of what is kept of a parameter and a new gradient; nothing is kept of it any more.

        Computed in the current stream, which has computed the gradient.

        Args:
            index: of the parameter.
            gradient: of this backward.
            keeps: whether the sum will be kept.
        """
        kept = self._sums.pop(index, None)
        if kept is not None:
            # Another tensor: autograd's own may share its memory with the gradient of another parameter.
            total = kept + gradient
            kept.record_stream(self._streams.current_stream())  # it may be the memory of another one
            return total
        if not keeps:
            return gradient
        total = gradient.to(self._parameters[index].dtype)
        # What is a part of something larger would keep all of it.
        return total.clone() if total.untyped_storage().nbytes() > total.nbytes else total

    def keep(self, index: int, total: torch.Tensor) -> None:
        """Keeps what `add` or `take` has returned for the next micro-batch."""
        self._sums[index] = total

    def take(self, index: int) -> torch.Tensor | None:
        """Hands out what is kept of a parameter that this backward gives no gradient to."""
        return self._sums.pop(index, None)

    def backward_begins(self) -> None:
        """Orders this backward after the micro-batches before; drops what the script has dropped."""
        for index in [index for index in self._sums if self._parameters[index].grad is None]:
            del self._sums[index]
        self._wait()

    def backward_ends(self) -> None:
        """Takes note that all gradients of a micro-batch are kept."""
        self._computed = self._arriving.note()

    def _wait(self) -> None:
        # Whatever stream a backward computes in: autograd begins in this one, and lets the others wait for it.
        for event in self._computed:
            self._streams.current_stream().wait_event(event)

    def hold_any(self, among: Collection[int] | None) -> bool:
        """Whether some that are kept are not 0; ``among`` has ids of parameters, None means all of them."""
        self._wait()
        asked = [
            kept
            for index, kept in self._sums.items()
            if self._parameters[index].grad is not None and (among is None or id(self._parameters[index]) in among)
        ]
        return any(bool(kept.any()) for kept in asked)

    def take_all(self) -> dict[int, torch.Tensor]:
        """Hands out all of them, by the indices of their parameters, in host memory."""
        self._wait()
        on_host = {index: kept.cpu() for index, kept in self._sums.items()}
        self._sums.clear()
        return on_host

    def drop(self) -> None:
        self._sums.clear()

    def give_up(self) -> None:
        """Drops them, and keeps none in future: a backward has failed, maybe for want of memory."""
        self._has_failed = self._has_failed or self._wants
        self._wants = False
        self._sums.clear()
