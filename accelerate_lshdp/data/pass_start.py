# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where a training pass starts: with an epoch, at a restored position, or after batches that are skipped."""

from __future__ import annotations

from typing import Any

from accelerate_lshdp.data.context import LoaderContext
from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.data.position import LoaderProgress, StartPoint


class PassStart:
    """Where the next training pass of a loader starts.

    Args:
        source: of its data.
        context: for what ranks have to agree on.
        progress: how far its data is trained.
        skip_to: what its passes skip: this rank's batches, or up to a position; None: nothing.
    """

    def __init__(
        self, source: Any, context: LoaderContext, progress: LoaderProgress, skip_to: StartPoint | int | None = None
    ) -> None:
        self._source = source
        self._context = context
        self._progress = progress
        self.skip_to = skip_to

    def skipping(self, num_batches: int | None) -> PassStart:
        """Where passes start that skip so many batches more; None: those up to the position.

        Raises:
            ValueError: there is no position, or it skips to one already.
        """
        if num_batches is None:
            self.require_position()
            skip_to: StartPoint | int = self._progress.start_point
        elif isinstance(self.skip_to, StartPoint):
            raise ValueError("found a loader that skips to a restored position, expected one that does not skip yet.")
        else:
            skip_to = num_batches + (self.skip_to or 0)
        return PassStart(self._source, self._context, self._progress, skip_to)

    @property
    def skipped_in_evaluation(self) -> int:
        """Batches that an evaluation pass leaves out."""
        return self.skip_to if isinstance(self.skip_to, int) else 0

    def require_position(self) -> None:
        """Raises ValueError if there is no position to go on from."""
        if not self._progress.restored and not self._progress.position.advanced:
            raise ValueError(
                "found no restored position, expected one to go on from. Call load_state (or load_state_dict) before"
                " the next training pass starts, train a part of an epoch, or say how many batches to skip."
            )

    def leave_restored_epoch(self) -> None:
        """Nobody draws the order of a restored epoch that is over: let the user's generator be as if one had."""
        if self._progress.position.next_generator_state is not None:
            self._source.set_generator_state(self._progress.position.next_generator_state)

    def of_pass(self, cut: GlobalBatchCut) -> tuple[int, StartPoint]:
        """The epoch that a training pass reads, and where it starts there."""
        progress, skip = self._progress, self.skip_to
        if skip is None and not progress.armed:
            if progress.next_epoch != progress.epoch:
                self.leave_restored_epoch()
            return progress.next_epoch, StartPoint()
        start = self._start_point(cut)
        goes_on = skip is None or isinstance(skip, StartPoint) or progress.counts_to_position(skip)
        if not goes_on and progress.is_over(start.global_batches):
            self.leave_restored_epoch()
            return progress.epoch + 1, start
        if progress.position.generator_state is not None:
            self._source.set_generator_state(progress.position.generator_state)
        return progress.epoch, start

    def _start_point(self, cut: GlobalBatchCut) -> StartPoint:
        skip = self.skip_to
        if skip is None:
            return self._progress.start_point
        if isinstance(skip, StartPoint):
            return skip
        steps = cut.steps[self._context.rank]
        start = self.training_skip()
        whole, rest = (start.global_batches, 0) if isinstance(start, StartPoint) else divmod(skip, steps)
        # Asked of all ranks first, so that none waits for one that stops here.
        self._context.check_agreement(
            str(whole) if not rest else "inside a global batch", "the global batches that skip_first_batches skips"
        )
        if rest:
            raise ValueError(
                f"found num_batches={skip}, which is inside a global batch ({steps} batches on this rank), expected a"
                f" multiple of {steps}: {whole * steps} or {(whole + 1) * steps}."
            )
        if isinstance(start, StartPoint):
            return start
        return StartPoint(samples=whole * cut.total, global_batches=whole)

    def training_skip(self) -> StartPoint | int | None:
        """What a training pass skips: the restored position, if the number is that of the run that saved it."""
        known = isinstance(self.skip_to, int) and self._progress.counts_to_position(self.skip_to)
        return self._progress.start_point if known else self.skip_to
