# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where a schedule goes on when a run has another number of ranks than the one that saved it.

accelerate steps a scheduler once a rank in every optimizer step, so its position counts ranks x steps. Scripts make
the length of their schedules for that, in one of two ways: from the length of the loader before it is prepared, which
does not change with the ranks; or from the number of steps times ``accelerator.num_processes``, which does. In an
elastic run the ranks change and the steps do not. Values of the schedule that were noted before tell which way it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.logging import get_logger
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LambdaLR


logger = get_logger(__name__)

_CLOSE = 1e-3


class SteppedLikeStart(AcceleratedScheduler):
    """accelerate's scheduler that is stepped as often as with another number of ranks: ``ranks_counted``."""

    ranks_counted: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer or self.split_batches or not self.gradient_state.sync_gradients:
            return super().step(*args, **kwargs)
        self.split_batches = True  # accelerate's word for one step at a time
        try:
            for _ in range(self.ranks_counted):
                last = getattr(self.scheduler, "total_steps", None)
                if last is None or self.scheduler._step_count <= last:
                    super().step(*args, **kwargs)
        finally:
            self.split_batches = False


def counted_ranks(scheduler: Any, ranks: int) -> int:
    """By how much the position of a scheduler of accelerate grows in an optimizer step."""
    return scheduler.ranks_counted if isinstance(scheduler, SteppedLikeStart) else ranks


def note(schedulers: Sequence[Any], ranks: int) -> list[dict[str, Any] | None]:
    """What `go_on` needs to know of each scheduler, as JSON values; None: nothing that would help."""
    return [_noted(scheduler, ranks) for scheduler in schedulers]


def _noted(scheduler: Any, ranks: int) -> dict[str, Any] | None:
    inner = scheduler.scheduler
    if not scheduler.step_with_optimizer or scheduler.split_batches or not isinstance(inner, LambdaLR):
        return None
    now = inner.last_epoch
    positions = sorted({0, now // 2, now, 2 * now, *(10**power for power in range(6))})
    known = [(position, values) for position in positions if (values := _values(inner, position)) is not None]
    return {
        "ranks": counted_ranks(scheduler, ranks),
        "positions": [position for position, _ in known],
        "values": [values for _, values in known],
    }


def go_on(schedulers: Sequence[Any], noted: Sequence[Mapping[str, Any] | None], ranks: int) -> None:
    """Lets schedulers, whose states have been restored, go on with another number of ranks.

    Args:
        schedulers: of accelerate.
        noted: by `note`, when they were saved.
        ranks: of this run.
    """
    for scheduler, before in zip(schedulers, noted, strict=True):
        if before is None:
            if scheduler.step_with_optimizer and not scheduler.split_batches:
                logger.warning(
                    "a scheduler is stepped once a rank in every optimizer step, and the number of ranks has changed:"
                    " it may go on at another place of its schedule. Use step_scheduler_with_optimizer=False and call"
                    " scheduler.step() once a step to be independent of that"
                )
            continue
        inner, saved = scheduler.scheduler, before["ranks"]
        now = [_values(inner, position) for position in before["positions"]]
        if saved == ranks or _agree(now, before["values"]):
            if saved != ranks:
                scheduler.__class__, scheduler.ranks_counted = SteppedLikeStart, saved
            continue
        moved = [_values(inner, position * ranks / saved) for position in before["positions"]]
        if not _agree(moved, before["values"]):
            logger.warning(
                f"a schedule is another one than before, when {saved} ranks stepped it: it goes on at the same part of"
                " its steps. Make it the same on all starts of the script"
            )
        inner.last_epoch = inner.last_epoch * ranks // saved
        inner._last_lr = inner.get_lr()
        for group, rate in zip(inner.optimizer.param_groups, inner._last_lr, strict=True):
            group["lr"] = rate


def _values(schedule: LambdaLR, position: float) -> list[float] | None:
    """The factors of a schedule at a position; None: it has none there, as beyond its end."""
    try:
        return [float(function(position)) for function in schedule.lr_lambdas]
    except Exception:  # a script's own function
        return None


def _agree(one: Sequence[Sequence[float] | None], other: Sequence[Sequence[float]]) -> bool:
    """Whether factors are the same wherever both are known."""
    known = [(left, right) for left, right in zip(one, other, strict=True) if left is not None]
    pairs = [pair for left, right in known for pair in zip(left, right, strict=True)]
    return bool(pairs) and all(abs(a - b) <= _CLOSE * max(abs(a), abs(b), 1e-3) for a, b in pairs)
