# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Writes the places of a rank's micro-batches."""

from __future__ import annotations

from accelerate_lshdp.data.place import MicroBatchPlace
from accelerate_lshdp.data.size_switch import CutSchedule


class PlaceWriter:
    """Writes the places of one rank's micro-batches, global batch after global batch.

    `open_window` is the number of global batches already in the optimizer step that this pass goes on with (only with
    `sync_with_dataloader=False`, where a step may span two passes).
    """

    def __init__(
        self,
        cuts: CutSchedule,
        rank: int,
        epoch: int,
        *,
        accumulation_steps: int,
        sync_with_dataloader: bool,
        first_sample: int = 0,
        global_batch: int = 0,
        open_window: int = 0,
    ) -> None:
        self.cuts = cuts
        self.rank = rank
        self.epoch = epoch
        self.accumulation_steps = accumulation_steps
        self.sync_with_dataloader = sync_with_dataloader
        self.first_sample = first_sample
        self.global_batch = global_batch
        self.open_window = open_window
        self._window = -1

    def write(self, total_samples: int, *, last: bool, samples_hash: int = 0) -> list[MicroBatchPlace]:
        """The places of the next global batch, of `total_samples` samples over all ranks, in the order of yielding."""
        starts = self.open_window == 0
        if starts:
            self._window = self.global_batch
        self.open_window += 1
        ends = self.open_window >= self.accumulation_steps or (last and self.sync_with_dataloader)
        if ends:
            self.open_window = 0
        cut = self.cuts.at(self.global_batch)
        micro_batches = cut.micro_batches(self.rank, total_samples)
        count = len(micro_batches)
        places = [
            MicroBatchPlace(
                epoch=self.epoch,
                global_batch=self.global_batch,
                first_sample=self.first_sample,
                total_samples=total_samples,
                samples=len(offsets),
                micro_batch=index,
                micro_batches=count,
                window_start=starts and index == 0,
                window_end=ends and index == count - 1,
                tokens=None,
                window_tokens=None,
                last_in_pass=last and index == count - 1,
                accumulation_steps=self.accumulation_steps,
                cut=cut,
                window=self._window,
                samples_hash=samples_hash,
            )
            for index, offsets in enumerate(micro_batches)
        ]
        self.first_sample += total_samples
        self.global_batch += 1
        return places
