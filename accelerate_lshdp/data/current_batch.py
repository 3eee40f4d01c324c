# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Which batch the script looks at: what metrics are of, whether that batch is trained or not."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_lshdp.data.yielded_batches import TrackedBatch


class BatchAtHand:
    """The batch that a loader yielded, a forward was given, or a backward was of: whichever was last.

    That of a pass which ends is given up for the one before the pass: metrics that follow are of no batch, or of one
    that a forward is given (which was fetched ahead).
    """

    def __init__(self) -> None:
        self.batch: TrackedBatch | None = None
        self._before: dict[int, TrackedBatch | None] = {}  # by the number of each pass that goes on

    def pass_begins(self, number: int) -> None:
        self._before[number] = self.batch

    def pass_ends(self, number: int) -> None:
        before = self._before.pop(number, None)
        if self.batch is not None and self.batch.pass_number == number:
            self.batch = before if before is not None and before.pass_number in self._before else None

    def turns_to(self, batches: Sequence[TrackedBatch]) -> None:
        """The script works on these batches; none: on something of no training pass."""
        if batches:
            self.batch = batches[0]
        elif self.batch is not None and self.batch.pass_number not in self._before:
            self.batch = None
