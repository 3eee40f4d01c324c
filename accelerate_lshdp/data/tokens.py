# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Loss tokens of an optimizer step, or labels of a global batch, known before the first micro-batch is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from accelerate_lshdp.data.labels import BatchLabels, LabelCounts
from accelerate_lshdp.data.place import PlacedBatch


class LabelCounter:
    """Stands for a token counter where it is not known yet which labels losses are means over: it counts all kinds.

    Args:
        of_steps: whether the micro-batches of an optimizer step are counted together, and each has to have labels;
            else those of a global batch.
    """

    def __init__(self, *, of_steps: bool) -> None:
        self.of_steps = of_steps
        self.wanted = True
        """While False, batches whose samples have at most one label are not held back. Where samples have several,
        other losses of these batches may count by them."""


def integer_labels(batch: Any) -> torch.Tensor | None:
    """The entry ``labels`` of a batch, if it may hold -100 for what has no label."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if torch.is_tensor(labels) and labels.ndim > 0 and labels.dtype in _INTEGERS else None


def _has_several_labels(batch: Any) -> bool:
    """Whether each sample has several labels."""
    labels = integer_labels(batch)
    return labels is not None and labels.ndim > 1


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def with_window_tokens(batches: Iterator[PlacedBatch], count: Callable[[Any], int]) -> Iterator[PlacedBatch]:
    """Hold each optimizer step back until it is complete, and write its loss tokens into its places."""
    if isinstance(count, LabelCounter):
        yield from _with_labels(batches, count)
        return
    window: list[PlacedBatch] = []

    def complete() -> Iterator[PlacedBatch]:
        tokens = [int(count(item.batch)) if item.place.samples else 0 for item in window]
        total = sum(tokens)
        for own in tokens:
            # Taken out: a batch that the script has dropped must not stay alive here.
            item = window.pop(0)
            yield item._replace(place=replace(item.place, tokens=own, window_tokens=total))

    for item in batches:
        window.append(item)
        if item.place.window_end:
            yield from complete()
    # Only with sync_with_dataloader=False: a step that the next pass goes on with.
    yield from complete()


def _with_labels(batches: Iterator[PlacedBatch], counter: LabelCounter) -> Iterator[PlacedBatch]:
    """Hold each step, or this rank's part of each global batch, back until it is complete, and count its labels."""
    together: list[PlacedBatch] = []

    def complete() -> Iterator[PlacedBatch]:
        labels = [integer_labels(item.batch) for item in together]
        if counter.of_steps and any(one is None for one in labels):
            raise ValueError(
                "loss_weighting='tokens' counts the entries of batch['labels'] that are not -100, but the batch has "
                "none; give LSDPPlugin(token_counter=...), a function from a batch to its number of loss tokens"
            )
        if any(one is None for one in labels):
            counts, marked = (), [None] * len(together)
        else:
            counts = tuple(LabelCounts.of(one, item.place.samples) for item, one in zip(together, labels, strict=True))
            # Copies: the place must not keep a batch alive that the script has dropped.
            marked = [BatchLabels(one.clone(), own, counts) for one, own in zip(labels, counts, strict=True)]
        labels.clear()
        total = sum(count.labels for count in counts)
        for one in marked:
            item = together.pop(0)
            if one is not None:
                item = item._replace(place=replace(item.place, labels=one))
                if counter.of_steps:
                    item = item._replace(place=replace(item.place, tokens=one.own.labels, window_tokens=total))
            yield item

    for item in batches:
        if not counter.wanted and not together and not _has_several_labels(item.batch):
            yield item
            continue
        together.append(item)
        if item.place.window_end if counter.of_steps else item.place.ends_global_batch:
            yield from complete()
    # Only with sync_with_dataloader=False: a step that the next pass goes on with.
    yield from complete()
