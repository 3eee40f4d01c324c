# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The batches of training passes that a script may still train, and how they are recognised by their tensors."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from accelerate_lshdp.data.batch_marks import TensorMark, key_of, tensors_in
from accelerate_lshdp.data.place import PlacedBatch


class TrackedBatch:
    """A batch that a loader yielded in a training pass: its place, and marks that recognise it."""

    def __init__(self, loader: Any, number: int, placed: PlacedBatch) -> None:
        self.loader = weakref.ref(loader)
        self.pass_number = number
        self.place = placed.place
        self.reading = placed.reading
        self.marks = [TensorMark(tensor) for tensor in tensors_in(placed.batch)]
        self.taken = False

    @property
    def window(self) -> tuple[int, int]:
        """The micro-batches of this rank that are accumulated for its optimizer step."""
        return self.pass_number, self.place.window

    @property
    def key(self) -> tuple[int, int, int]:
        """Tells it from others, also from those of other passes."""
        return self.pass_number, self.place.global_batch, self.place.micro_batch

    @property
    def goes_on_from_earlier_pass(self) -> bool:
        """Whether its window began in an earlier pass over its loader."""
        return self.place.window < 0

    @property
    def is_blind(self) -> bool:
        """Whether nothing tells this batch from others: it has no tensors, or all batches share them."""
        return not self.marks

    @property
    def alive(self) -> bool:
        """Whether the script may still train it; one that is blind waits until it is taken."""
        return any(mark.alive for mark in self.marks) if self.marks else not self.taken

    @property
    def whole(self) -> bool:
        """Whether all of it is alive: of trained batches scripts keep parts, such as labels for a metric."""
        return bool(self.marks) and all(mark.alive for mark in self.marks)


class YieldedBatches:
    """Remembers batches while they may be trained.

    Attributes:
        batches: in the order of yielding.
    """

    def __init__(self) -> None:
        self.batches: list[TrackedBatch] = []
        self._marked: dict[tuple[str, int], list[tuple[TrackedBatch, TensorMark]]] = defaultdict(list)
        self._common: dict[tuple[str, int], TensorMark] = {}  # memory that several batches share
        self._prune_at = 16

    def add(self, batch: TrackedBatch, kept: Collection[TrackedBatch]) -> None:
        """Takes in a batch.

        Args:
            batch: the batch that was yielded last.
            kept: batches that are worked on.
        """
        if len(self.batches) >= self._prune_at:
            self._prune(kept)
        self.batches.append(batch)
        for mark in list(batch.marks):
            self._keep_if_own(batch, mark)

    def _keep_if_own(self, batch: TrackedBatch, mark: TensorMark) -> None:
        """Forgets a mark that another batch has, too: a tensor that all batches share tells nothing."""
        common = self._common.get(mark.key)
        # Of a view only its object tells that it is gone; its memory may be that of a batch to come.
        known = self._marked[mark.key] = [other for other in self._marked[mark.key] if other[1].alive]
        sharing = [other for other in known if other[1].is_of_same(mark)]
        if sharing or (common is not None and common.is_of_same(mark)):
            self._common[mark.key] = mark
            batch.marks.remove(mark)
            for other, same in sharing:
                known.remove((other, same))
                other.marks.remove(same)
        else:
            known.append((batch, mark))

    def _prune(self, kept: Collection[TrackedBatch]) -> None:
        """Drops what nobody can train any more, so that a loader that is only read leaves nothing behind."""
        dead = [batch for batch in self.batches if not batch.alive and batch not in kept]
        missed = [batch for batch in dead if not batch.taken]
        blind = [batch for batch in self.batches if batch.is_blind and not batch.taken]
        # Two are as good as many: they say that it is unknown which was trained.
        for batch in [*(b for b in dead if b.taken), *missed[:-2], *blind[:-2]]:
            self.drop(batch)
        self._prune_at = 16 + 2 * len(self.batches)

    def drop(self, batch: TrackedBatch) -> None:
        if batch in self.batches:
            self.batches.remove(batch)
        for mark in batch.marks:
            left = [pair for pair in self._marked.get(mark.key, ()) if pair[0] is not batch]
            if left:
                self._marked[mark.key] = left
            else:
                self._marked.pop(mark.key, None)

    def recognise(self, tensors: Iterable[Any]) -> list[TrackedBatch]:
        """The batches in whose memory any of these tensors lies, in the order of yielding."""
        found = set()
        for tensor in tensors:
            found.update(batch for batch, mark in self._marked.get(key_of(tensor), ()) if mark.covers(tensor))
        return [batch for batch in self.batches if batch in found] if found else []
