# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a loader asks of the accelerator that prepared it, and tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from accelerate_lshdp.data.place import PlacedBatch
from accelerate_lshdp.documents.plan import RankBatch


class LoaderContext(Protocol):
    """What a loader needs from the accelerator. Attributes are read at the start of a pass, `seed` when prepared."""

    rank: int
    world_size: int
    rank_batches: tuple[RankBatch, ...] | None
    """The plan's sizes, or None: the loader's own batch_size on every rank."""
    follows_script: bool
    """Each loader's global batch is that of plain accelerate, its own batch_size x ranks; the plan's sizes say how it
    is divided."""
    expects_training: bool
    """An optimizer is prepared, and nothing says that the next pass is for evaluation but the mode of the models."""
    seed: int
    """Agreed by all ranks; shuffling starts from it."""
    gradient_accumulation_steps: int
    """The script's own g: an optimizer step is g global batches."""
    sync_with_dataloader: bool
    """The last global batch of a pass always ends an optimizer step."""
    token_counter: Callable[[Any], int] | None
    """Loss tokens of a collated micro-batch, which is still on the host."""

    def is_evaluation_pass(self) -> bool: ...

    def check_agreement(self, digest: str, what: str) -> None:
        """Collective. Raises on all ranks if the digests differ; `what` says what should have been equal."""

    def reports_training(self) -> bool:
        """Whether batches of a pass that begins now are reported as trained (`batch_trained` of the loader)."""

    def begin_pass(self, loader: Any) -> None: ...

    def end_pass(self, loader: Any) -> None: ...

    def batch_yielded(self, loader: Any, placed: PlacedBatch) -> None:
        """A training pass is about to yield a batch, on its device."""
