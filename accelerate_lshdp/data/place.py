# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Where a batch stands in its epoch, global batch and optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accelerate_lshdp.data.cut import GlobalBatchCut
from accelerate_lshdp.data.labels import BatchLabels


@dataclass(frozen=True, slots=True)
class MicroBatchPlace:
    """Where a batch of a training pass stands. Counts are of samples unless they are named otherwise."""

    epoch: int
    global_batch: int
    """Index of the global batch in the epoch, counted from the epoch's start, also after a skip."""
    first_sample: int
    """Samples of the epoch before this global batch."""
    total_samples: int
    """Samples of this global batch, over all ranks."""
    samples: int
    """Real samples of this rank in this micro-batch; 0: it holds a repeated sample, whose loss must not count."""
    micro_batch: int
    """0 .. micro_batches - 1 on this rank."""
    micro_batches: int
    """This rank's accumulation steps for one global batch."""
    window_start: bool
    """First micro-batch of an optimizer step on this rank."""
    window_end: bool
    """Last micro-batch of an optimizer step on this rank: gradients are synchronised here."""
    tokens: int | None
    """Loss tokens of this micro-batch on this rank; only with a token counter."""
    window_tokens: int | None
    """This rank's loss tokens over the whole optimizer step; only with a token counter."""
    last_in_pass: bool
    accumulation_steps: int
    """Global batches of an optimizer step, as the script had set it when the pass began."""
    cut: GlobalBatchCut
    """The sizes of all ranks that this global batch was cut with, a short one in proportion to them."""
    window: int
    """The global batch that its optimizer step began with; -1: in an earlier pass."""
    samples_hash: int
    """Of the indices of all samples of this global batch, for ranks to compare; 0: they are not known (streams)."""
    labels: BatchLabels | None = field(default=None, compare=False, repr=False)
    """Its integer labels, if they may say by how much its loss counts."""

    @property
    def ends_global_batch(self) -> bool:
        """Whether this rank has read its whole share of the global batch with this micro-batch."""
        return self.micro_batch == self.micro_batches - 1


class StreamReading(NamedTuple):
    """How far the workers of a stream have been read, at the end of a global batch."""

    worker_samples: tuple[int, ...]
    next_worker: int
    """The worker that gives the next global batch."""


class PlacedBatch(NamedTuple):
    """A collated micro-batch of a training pass, where it stands, and how far its stream is read with it."""

    batch: Any
    place: MicroBatchPlace
    reading: StreamReading | None
    """At the end of its global batch; None: the data is no stream."""
