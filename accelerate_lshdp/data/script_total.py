# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The global batch that a script assumes of its loader: as many samples as plain accelerate takes at a time.

Everything that a script computes from ``len(loader)`` (steps, schedules, epochs) is for these.
"""

from __future__ import annotations

from typing import Any

from accelerate_lshdp.data.cut import GlobalBatchCut, count_batches, largest_remainder
from accelerate_lshdp.runtime.elastic_rank import ranks_at_start


def cut_like_script(source: Any, world_size: int, planned: GlobalBatchCut | None) -> GlobalBatchCut:
    """A global batch of the script's size in the proportions of the plan, or in equal parts if it has none yet.

    Args:
        source: of the script's loader.
        world_size: number of ranks.
        planned: the plan's sizes.

    Raises:
        ValueError: the loader says no size, or one that cannot be split.
    """
    total = script_total(source, world_size)
    if total is None:
        total = _total_without_batch_size(source, world_size, planned)
    if planned is None:
        return GlobalBatchCut(largest_remainder(total, (1,) * world_size), (1,) * world_size)
    return planned.scaled(total)


def script_total(source: Any, world_size: int) -> int | None:
    """Samples that plain accelerate takes at a time; None if batches have no fixed size.

    Raises:
        ValueError: ``split_batches`` with a batch that cannot be split.
    """
    if not isinstance(source.batch_size, int):
        return None
    world_size = ranks_at_start(world_size)
    if not source.split_batches:
        return source.batch_size * world_size
    if source.batch_size % world_size:
        raise ValueError(
            f"found split_batches=True with a batch_size of {source.batch_size} on {world_size} ranks, expected a"
            " multiple of the ranks, which plain accelerate needs, too. Change batch_size."
        )
    return source.batch_size


def _total_without_batch_size(source: Any, world_size: int, planned: GlobalBatchCut | None) -> int:
    """A total with which an epoch has as many global batches as plain accelerate makes of the batch sampler's."""
    world_size = ranks_at_start(world_size)
    known = source.batches_and_samples()
    if known is None and planned is not None:
        return planned.total  # the script cannot have computed anything from a length
    if known is not None:
        batches, samples = known
        steps = count_batches(batches, world_size, source.drop_last)
        # If this size does not do, none does: it is the smallest if a short last batch counts, else the largest.
        computed = max(world_size, count_batches(samples, max(1, steps), source.drop_last))
        for total in ([planned.total] if planned is not None else []) + [computed]:
            if count_batches(samples, total, source.drop_last) == steps:
                return total
    raise ValueError(
        "found a batch sampler without an integer batch_size, and no size of a global batch with which an epoch has"
        " as many steps as with plain accelerate. Give the batch sampler a batch_size, the plan a total"
        ' ("automatic": {"total": ...}), or keep that of the plan (accelerate-lshdp launch --keep-plan-total).'
    )
