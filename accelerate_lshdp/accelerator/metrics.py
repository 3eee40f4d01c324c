"""Collectives that a script calls itself: gathering and reducing metrics under unequal batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils.operations import gather_object, recursively_apply

from accelerate_lshdp.runtime.failures import failures_explained
from accelerate_lshdp.runtime.uneven_gather import gather_unequal


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object


class Collecting(_Base):
    """The part of ``LSHDPAccelerator`` that gathers."""

    @failures_explained()
    def gather(self, tensor: Any) -> Any:
        """Concatenates tensors of all ranks along the first dimension, whose size may differ between ranks."""
        self._meet("gather")
        if self.num_processes == 1:
            return super().gather(tensor)
        return gather_unequal(tensor)

    @failures_explained()
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers, without the samples that were only repeated to give every rank a batch."""
        loader = self.gradient_state.active_dataloader
        # Without a loader in a pass the batch was fetched ahead.
        trains = loader is None or not getattr(loader, "is_evaluating", True)
        place = self._tracker.place_at_hand(input_data) if trains else None
        if place is None or self.num_processes == 1:
            return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)
        if not use_gather_object and _holds_tensors_only(input_data):
            if place.samples == 0:
                input_data = recursively_apply(lambda tensor: tensor[:0] if tensor.ndim else tensor, input_data)
            return self.gather(input_data)
        self._meet("gather_for_metrics")
        if place.samples == 0:
            input_data = []  # objects of all ranks are put one after the other, of whatever type this one's are
        return gather_object(input_data)

    @failures_explained()
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        self._meet("reduce")
        return super().reduce(tensor, reduction, scale)

    @failures_explained()
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        self._meet("pad_across_processes")
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    @failures_explained()
    def wait_for_everyone(self) -> None:
        self._meet("wait_for_everyone")
        super().wait_for_everyone()

    def _meet(self, call: str) -> None:
        """Raises RuntimeError on all ranks if one of them is not in the last micro-batch of its step (collective)."""
        for prepared in self._prepared:
            prepared.collective_begins()
        place = self._tracker.current
        several = self._exchange.counts is not None and self._tracker.accumulating
        if several and self._losses is not None and place is not None:
            self._losses.look_before_meeting(place)
        meeting = self._exchange.announce(call, self._tracker.within_window)
        if meeting is not None:
            meeting.require_all()


def _holds_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
