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
    Batches of several loaders that were fetched together (``zip``) are taken together.
    """

    def __init__(self) -> None:
        self.current: MicroBatchPlace | None = None
        self.accumulating = False
        self._counted = False
        self._over = False  # whether the pass of the current batch has ended
        self._waiting: deque[tuple[int, MicroBatchPlace]] = deque()
        self._evaluating: list[Any] = []
        self._last_evaluates = False  # whether the loader that was used last is in an evaluation pass

    def begin_pass(self, loader: Any, evaluation: bool) -> None:
        if evaluation:
            self._evaluating.append(loader)
            self._last_evaluates = True
            return
        self._waiting = deque((owner, place) for owner, place in self._waiting if owner != id(loader))
        self.current = None

    def end_pass(self, loader: Any) -> None:
        if loader in self._evaluating:
            self._evaluating = [other for other in self._evaluating if other is not loader]
        else:
            self._over = not self.accumulating

    def batch_yielded(self, loader: Any, place: MicroBatchPlace) -> None:
        self._waiting.append((id(loader), place))
        self._last_evaluates = False

    @property
    def waiting(self) -> list[MicroBatchPlace]:
        """The places of the batches that were fetched ahead, in order."""
        return [place for _, place in self._waiting]

    def is_waiting(self, loader: Any) -> bool:
        """Whether a batch that this loader yielded was not worked on yet."""
        return any(owner == id(loader) for owner, _ in self._waiting)

    @property
    def in_evaluation_pass(self) -> bool:
        """Whether the script works on an evaluation pass, not on a training pass beside one that it left open."""
        return bool(self._evaluating) and self._last_evaluates

    def take(self) -> MicroBatchPlace | None:
        """The place of the next batch, or of the current one if no other was yielded and its pass goes on.

        After a pass a loss can only be of a batch that no loader yielded, whose place is None.

        Raises:
            RuntimeError: batches of several loaders were fetched together, and they do not count the same.
        """
        if not self._waiting:
            return None if self._over else self.current
        together: dict[int, MicroBatchPlace] = {}
        for owner, place in self._waiting:
            together.setdefault(owner, place)
        self.current, *others = together.values()
        for owner, place in together.items():
            self._waiting.remove((owner, place))
        for other in others:
            self._require_same(self.current, other)
        self._counted = self._over = False
        return self.current

    @staticmethod
    def _require_same(one: MicroBatchPlace, other: MicroBatchPlace) -> None:
        found = [
            f"samples {place.samples} of {place.total_samples}, loss tokens {place.tokens} of {place.window_tokens}, "
            f"micro-batch {place.micro_batch + 1} of {place.micro_batches}, ends the step: {place.window_end}"
            for place in (one, other)
        ]
        if found[0] != found[1]:
            raise RuntimeError(
                f"found batches of two loaders that were fetched together, but count differently ({found[0]}; "
                f"{found[1]}), so a loss of both has no one weight. Fetch the second after the backward of the first, "
                "give short last batches up with drop_last=True, or make one dataset of the two"
            )

    def first_time(self) -> bool:
        """Whether there is a current batch and this was not asked for it before: two losses of it count once."""
        first = self.current is not None and not self._counted
        self._counted = True
        return first

    @property
    def within_window(self) -> bool:
        """Whether this rank still has micro-batches of the current optimizer step before it."""
        return self.current is not None and not self.current.window_end
