"""Which batch the script is working on: the link between loaders, ``accumulate`` and ``backward``."""

from __future__ import annotations

from collections import deque
from typing import Any

from accelerate_lshdp.data_places import MicroBatchPlace


class BatchTracker:
    """Follows batches from the loader to the backward.

    A script may fetch several batches before it works on the first (look-ahead, as the Trainer does), so batches are
    taken in the order in which they were yielded: one by each ``accumulate``, or by each ``backward`` outside of it. A
    further ``accumulate`` or ``backward`` without a new batch belongs to the same batch (two losses, two models).
    """

    def __init__(self) -> None:
        self.current: MicroBatchPlace | None = None
        self.accumulating = False
        self._counted = False
        self._waiting: deque[tuple[int, MicroBatchPlace]] = deque()
        self._evaluating: list[Any] = []

    def begin_pass(self, loader: Any, evaluation: bool) -> None:
        if evaluation:
            self._evaluating.append(loader)
            return
        self._waiting = deque((owner, place) for owner, place in self._waiting if owner != id(loader))
        self.current = None

    def end_pass(self, loader: Any) -> None:
        self._evaluating = [other for other in self._evaluating if other is not loader]

    def batch_yielded(self, loader: Any, place: MicroBatchPlace) -> None:
        self._waiting.append((id(loader), place))

    @property
    def in_evaluation_pass(self) -> bool:
        return bool(self._evaluating)

    def take(self) -> MicroBatchPlace | None:
        """The place of the next batch, or of the current one if no other was yielded."""
        if self._waiting:
            self.current = self._waiting.popleft()[1]
            self._counted = False
        return self.current

    def first_time(self) -> bool:
        """Whether there is a current batch and this was not asked for it before: two losses of it count once."""
        first = self.current is not None and not self._counted
        self._counted = True
        return first

    @property
    def within_window(self) -> bool:
        """Whether this rank still has micro-batches of the current optimizer step before it."""
        return self.current is not None and not self.current.window_end
