# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Sizes that change in the middle of a training pass: which sizes each global batch is cut with.

Loaders of several ranks run ahead of training by different amounts. So that all of them change their sizes at the same
global batch, ranks tell each other how many global batches each has cut already (`CutSchedule.ahead`), and change
after the largest of these numbers. The samples of a global batch do not depend on how it is cut.
"""

from __future__ import annotations

from accelerate_lshdp.data.cut import GlobalBatchCut


class CutSchedule:
    """The sizes of each global batch of one training pass that starts at global batch `start`, on one rank.

    What is cut stays cut: asked again for a global batch, the schedule gives the same sizes again.
    """

    def __init__(self, cut: GlobalBatchCut, start: int = 0) -> None:
        self.initial = cut
        self.furthest = start - 1
        """The last global batch that was cut."""
        self.last_yielded = start - 1
        """The global batch of the micro-batch that the script got last."""
        self.changes = [(start, cut)]
        """From each of these global batches on, these sizes; what was said last counts."""

    @property
    def total(self) -> int:
        """Samples of a full global batch, over all ranks."""
        return self.initial.total

    @property
    def ahead(self) -> int:
        """Global batches that were cut already, beyond the one that was yielded last."""
        return self.furthest - self.last_yielded

    def at(self, global_batch: int) -> GlobalBatchCut:
        """The sizes that this global batch is cut with, from now on for good."""
        self.furthest = max(self.furthest, global_batch)
        return next(cut for first, cut in reversed(self.changes) if first <= global_batch)

    def follow(self, other: CutSchedule, global_batch: int) -> None:
        """Use, from the start on, the sizes that another pass has from its `global_batch` on.

        So batches of two passes that are fetched together have the same sizes. To be called before anything is cut.
        """
        shift = self.furthest + 1 - global_batch
        self.changes = [
            (max(first + shift, self.furthest + 1), cut.scaled(self.total)) for first, cut in other.changes
        ]

    def switch(self, first: int, cut: GlobalBatchCut) -> None:
        """Use other sizes from global batch `first` on, in place of all that were to come there or later.

        Raises ValueError if these sizes would change the global batches or the number of micro-batches, RuntimeError
        if `first` was cut already.
        """
        if (cut.total, cut.steps) != (self.total, self.initial.steps):
            raise ValueError(
                f"found {cut.total} samples in {cut.steps} micro-batches a rank to switch to, expected {self.total} in"
                f" {self.initial.steps}: within a pass only the ranks' shares of a global batch can change. Start a"
                " new pass with these sizes."
            )
        if first <= self.furthest:
            raise RuntimeError(
                f"found a switch of sizes at global batch {first}, but this rank has cut all up to {self.furthest},"
                f" expected one at {self.furthest + 1} or later: ranks would train on different shares. Switch before"
                " the next batch is fetched, with the largest read_ahead of all ranks."
            )
        self.changes.append((first, cut))
