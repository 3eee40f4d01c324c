# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A learning rate schedule that does not fit the plan's global batches, told when it is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.logging import get_logger

from accelerate_lshdp.accelerator.session import Session
from accelerate_lshdp.data.cut import count_batches


logger = get_logger(__name__)


def warn_of_schedule(session: Session, prepared: Sequence[Any], accumulation_steps: int) -> None:
    """Warns if a loader's own batch size, from which scripts compute schedules, does not make the plan's total.

    accelerate steps a scheduler once a rank; that fits schedules made from the loader's own batch size only.

    Args:
        session: with the plan.
        prepared: what the script gives ``prepare``.
        accumulation_steps: global batches of an optimizer step.
    """
    ranks, planned = session.world_size, session.plan.total_batch_size
    for loader in prepared:
        size = getattr(loader, "batch_size", None)
        if isinstance(loader, torch.utils.data.DataLoader) and size and size * ranks != planned:
            logger.warning_once(
                f"the loader's batch_size {size} x {ranks} ranks is not the plan's global batch of {planned}. The "
                f"scheduler is stepped {ranks} times an optimizer step, so its length should be {ranks} x the "
                f"number of optimizer steps{_schedule_of_an_epoch(loader, planned, accumulation_steps, ranks)}"
            )


def _schedule_of_an_epoch(
    loader: torch.utils.data.DataLoader, total_batch_size: int, accumulation_steps: int, ranks: int
) -> str:
    """In numbers, where the length of the data is known."""
    try:
        samples = len(loader.dataset)
    except TypeError:
        return ""
    batches = count_batches(samples, total_batch_size, loader.drop_last)
    steps = -(-batches // accumulation_steps)
    return f": an epoch has {steps}, so {ranks * steps} of the schedule"
