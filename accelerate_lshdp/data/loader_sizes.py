# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How many samples the batches of a loader have: the plan's, or those that its own batch size makes.

`LoaderSizes.count` says how many global batches an epoch has; `len(loader)` is made of it in `loader`.
"""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger

from accelerate_lshdp.data.context import LoaderContext
from accelerate_lshdp.data.cut import GlobalBatchCut, count_batches
from accelerate_lshdp.data.script_total import cut_like_script


logger = get_logger(__name__)


class LoaderSizes:
    """The sizes of one loader's global batches.

    Args:
        source: of its data.
        context: with the plan's sizes.
    """

    def __init__(self, source: Any, context: LoaderContext) -> None:
        self._source = source
        self._context = context

    def cut(self) -> GlobalBatchCut:
        """The cut that a training pass begins with.

        Raises:
            ValueError: neither the plan nor the loader has a batch size, or it cannot be divided among ranks.
        """
        context = self._context
        planned = None if context.rank_batches is None else GlobalBatchCut.from_plan(context.rank_batches)
        if context.follows_script:
            return cut_like_script(self._source, context.world_size, planned)
        if planned is not None:
            return planned
        batch_size = self._source.batch_size
        if not isinstance(batch_size, int):
            raise ValueError(
                "found a batch sampler without an integer batch_size, expected one for a training pass: the plan has"
                " no batch sizes. Give the batch sampler a batch_size, or the plan batch sizes."
            )
        if not self._source.split_batches:
            return GlobalBatchCut.equal(batch_size, context.world_size)
        if batch_size % context.world_size:
            raise ValueError(
                f"found split_batches=True with a batch_size of {batch_size} on {context.world_size} ranks, expected a"
                " multiple of the ranks. Change batch_size, or give the plan batch sizes."
            )
        return GlobalBatchCut.equal(batch_size // context.world_size, context.world_size)

    def count(self, samples: int, cut: GlobalBatchCut) -> int:
        """The number of global batches that so many samples make."""
        return count_batches(samples, cut.total, self._source.drop_last)

    def of_evaluation(self) -> int:
        """Samples of all ranks in one iteration of an evaluation pass."""
        source = self._source
        return source.batch_size * (1 if source.split_batches else self._context.world_size)

    def say(self, cut: GlobalBatchCut) -> None:
        """Says once that the plan's sizes replace those of the loader."""
        context, source = self._context, self._source
        if context.rank_batches is None:
            return
        if source.own_batch_sampler is not None:
            logger.warning_once(
                f"The plan's batch sizes (global batch {cut}) replace the batches of {source.own_batch_sampler} in"
                " training passes: its order of the samples is kept, but not which it puts together. A batch of this"
                " rank may have samples of several of its batches: where these belong together (one task a batch, no"
                f" duplicates), let it make batches of {cut.total}, none of them shorter, which are the global batches"
                " then."
            )
        elif cut.sizes != (source.batch_size,) * context.world_size:
            logger.warning_once(
                f"The plan's batch sizes (global batch {cut}) replace the loader's batch_size={source.batch_size} in"
                " training passes; evaluation passes keep it."
            )
