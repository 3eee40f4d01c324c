"""Collectives that a script calls itself: gathering and reducing metrics under unequal batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils.operations import gather_object, recursively_apply

from accelerate_lshdp.gathering import gather_unequal


if TYPE_CHECKING:
    from accelerate import Accelerator

    _Base = Accelerator
else:
    _Base = object


class Collecting(_Base):
    """The part of ``LSHDPAccelerator`` that gathers."""

    def gather(self, tensor: Any) -> Any:
        """Concatenates tensors of all ranks along the first dimension, whose size may differ between ranks."""
        self._require_all_at_window_end("gather")
        if self.num_processes == 1:
            return super().gather(tensor)
        return gather_unequal(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers, without the samples that were only repeated to give every rank a batch."""
        place = self._tracker.current
        loader = self.gradient_state.active_dataloader
        trains = self._tracker.accumulating or (loader is not None and not getattr(loader, "is_evaluating", True))
        if not trains or place is None or self.num_processes == 1:
            return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)
        if not use_gather_object and _holds_tensors_only(input_data):
            if place.samples == 0:
                input_data = recursively_apply(lambda tensor: tensor[:0] if tensor.ndim else tensor, input_data)
            return self.gather(input_data)
        self._require_all_at_window_end("gather_for_metrics")
        if place.samples == 0:
            input_data = input_data[:0]
        return gather_object(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        self._require_all_at_window_end("reduce")
        return super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        self._require_all_at_window_end("pad_across_processes")
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def _require_all_at_window_end(self, call: str) -> None:
        """Under unequal numbers of micro-batches ranks meet only at the last one of a step (collective).

        Raises:
            RuntimeError: on all ranks, if one of them is in another micro-batch.
        """
        if self.plan.batch is None or len({steps for _, steps in self.plan.micro_batches}) == 1:
            return
        if not self._exchange.all_true(not self._tracker.within_window):
            counts = [steps for _, steps in self.plan.micro_batches]
            raise RuntimeError(
                f"{call} was called while some ranks have micro-batches of the step before them. The plan gives ranks "
                f"different numbers of micro-batches ({counts}), so they meet "
                "only at the last one: call it under `if accelerator.sync_gradients:`"
            )


def _holds_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
