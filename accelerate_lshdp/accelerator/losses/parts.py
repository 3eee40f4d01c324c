# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the loss of a batch is made of, and the halves of a batch that show it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate_lshdp.data.labels import IGNORED_LABEL
from accelerate_lshdp.runtime.object_exchange import as_bytes


class Composition(Enum):
    """How the loss of a batch is made of those of its parts."""

    SAMPLES = "the mean over samples"
    LABELS = "the mean over labels"
    SHIFTED_LABELS = "the mean over labels, less the first of each row, which no token predicts"
    SUM = "the sum over samples"
    GLOBAL = "divided by a number that is that of all ranks already"
    UNKNOWN = "something else"

    @property
    def by_labels(self) -> bool:
        """Whether parts count by their labels."""
        return self in (Composition.LABELS, Composition.SHIFTED_LABELS)

    def count(self, batch: Any, samples: int) -> int:
        """By how much the loss of a part counts in that of the whole.

        Args:
            batch: the part.
            samples: its number of samples.
        """
        if self is Composition.SUM:
            return 1
        return count_labels(batch["labels"], self is Composition.SHIFTED_LABELS) if self.by_labels else samples


def count_labels(labels: torch.Tensor, shifted: bool) -> int:
    """The labels that a mean over labels is over.

    Args:
        labels: integers; -100 where there is none.
        shifted: whether the first of each row has nothing that predicts it.
    """
    return int((labels[..., 1:] if shifted else labels).ne(IGNORED_LABEL).sum())


def restore_findings(findings: dict[str, dict[str, Any]], saved: Any) -> None:
    """Takes over what losses were found to be in the run that a checkpoint is of; older checkpoints know nothing.

    Args:
        findings: of this run: the Trainer's, and those of a loop; changed in place.
        saved: as it was in the checkpoint.
    """
    saved = saved if isinstance(saved, dict) else {}
    trainer, loop = ({} if not isinstance(saved.get(name), dict) else saved[name] for name in ("trainer", "loop"))
    if isinstance(trainer.get("uses_count"), bool):
        findings.setdefault("trainer", {})["uses_count"] = trainer["uses_count"]
    compositions, varying = trainer.get("compositions"), trainer.get("varying")
    if isinstance(compositions, dict):
        known = {look: name for look, name in compositions.items() if name in Composition.__members__}
        findings.setdefault("trainer", {})["compositions"] = known
    if isinstance(varying, list):
        findings.setdefault("trainer", {})["varying"] = [look for look in varying if isinstance(look, str)]
    for name, found in loop.items():
        known = isinstance(found, dict) and found.get("composition") in Composition.__members__
        # Without what tells it from other losses, as in older checkpoints, it is found again.
        if known and isinstance(found.get("counts"), bool) and isinstance(found.get("seen"), str):
            findings.setdefault("loop", {})[name] = found


# The halves of a batch

Half = tuple[Any, int]
"""A part of a batch, and its number of samples."""


def halvings(batch: Any, samples: int | None) -> list[tuple[Half, Half]]:
    """The ways in which a batch may fall into two halves; none if it cannot be told, or if it has one sample.

    Some collators put several rows of each sample into a batch (a chosen and a rejected answer): all first ones before
    all second ones, or each sample's together. Which of the two cannot be seen, so both are given.

    Args:
        batch: a mapping of what has one entry, or as many, for each sample.
        samples: of the batch; None: as many as rows.
    """
    rows = set(_lengths(batch)) if isinstance(batch, Mapping) else set()
    if samples is None:
        samples = rows.pop() if len(rows) == 1 else 0
        rows = {samples}
    if samples < 2 or not rows or any(length == 0 or length % samples for length in rows):
        return []
    first = samples // 2
    spans = ((0, first), (first, samples))
    layouts: Sequence[Callable[[int, int, int], list[int]]] = [_in_blocks, _together]
    if rows == {samples}:
        layouts = layouts[:1]

    def half(choose: Callable[[int, int, int], list[int]], begin: int, end: int) -> Half:
        def rows_of(length: int) -> list[int]:
            times = length // samples
            return [row for index in range(begin, end) for row in choose(index, times, samples)]

        return _selected(batch, lambda length: sorted(rows_of(length))), end - begin

    return [tuple(half(choose, *span) for span in spans) for choose in layouts]


def _in_blocks(index: int, times: int, samples: int) -> list[int]:
    return [index + samples * time for time in range(times)]


def _together(index: int, times: int, samples: int) -> list[int]:
    return [index * times + time for time in range(times)]


def _has_length(value: Any) -> bool:
    return value.ndim > 0 if torch.is_tensor(value) else isinstance(value, list | tuple)


def _lengths(batch: Mapping[str, Any]) -> Iterator[int]:
    for value in batch.values():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif _has_length(value):
            yield len(value)


def _selected(batch: Mapping[str, Any], rows_of: Callable[[int], list[int]]) -> dict[str, Any]:
    def select(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _selected(value, rows_of)
        if not _has_length(value):
            return value
        rows = rows_of(len(value))
        return value[rows] if torch.is_tensor(value) else type(value)([value[row] for row in rows])

    return {name: select(value) for name, value in batch.items()}


# Trying a loss


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, forwards are without dropout and gradients; afterwards everything is as if they had not been.

    Restored are the mode of each module, buffers (running statistics, counters) and the generators of random numbers.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()  # dropout would make any two losses different
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                # Not touched if it is as it was: a backward that follows may need it unchanged.
                if not torch.equal(as_bytes(buffer), as_bytes(value)):
                    buffer.copy_(value)
