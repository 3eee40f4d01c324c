"""Loss tokens of an optimizer step, known before its first micro-batch is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from accelerate_lshdp.data_places import PlacedBatch


def with_window_tokens(batches: Iterator[PlacedBatch], count: Callable[[Any], int]) -> Iterator[PlacedBatch]:
    """Hold each optimizer step back until it is complete, and write its loss tokens into its places."""
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
