# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the loss of a batch would be as one mean or another, computed from the model's own logits.

The logits are those of the forward that the loss is of, with its dropout, so a loss that is one of these equals it to
rounding, and nothing has to be computed again. Of a head in slices, which keeps no logits, the losses of the rows are
taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy, pad

from accelerate_lshdp.data.labels import IGNORED_LABEL
from accelerate_lshdp.engine.stores.sliced.head_loss import RowLosses


class CrossEntropies(NamedTuple):
    """Of one batch; NaN for what it cannot be."""

    labels: float = math.nan
    """The mean over labels."""
    shifted: float = math.nan
    """The mean over labels but the first of each row, each predicted from the entry before it."""
    samples: float = math.nan
    """The mean over samples of each one's mean over its labels."""
    shifted_samples: float = math.nan
    sums_a_sample: float = math.nan
    """The mean over samples of the sum over each one's labels."""
    shifted_sums_a_sample: float = math.nan
    positions: float = math.nan
    """The mean over all entries of all rows, those without a label being 0."""
    shifted_positions: float = math.nan
    sum_of_labels: float = math.nan
    sum_of_shifted: float = math.nan


@torch.no_grad()
def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> CrossEntropies:
    """Row by row, so that it takes little memory.

    Args:
        logits: of classes, which are the last dimension, or the second as in torch's losses.
        labels: integers; -100 where there is none.
    """
    if not logits.is_floating_point() or logits.ndim != labels.ndim + 1 or len(logits) != len(labels):
        return CrossEntropies()
    classes_second = logits.ndim > 2 and logits.shape[:1] + logits.shape[2:] == labels.shape
    if logits.shape[:-1] != labels.shape and not classes_second:
        return CrossEntropies()
    rows = list(zip(logits, labels.to(logits.device), strict=True))
    if logits.shape[:-1] != labels.shape:
        rows = [(row.movedim(0, -1), of_row) for row, of_row in rows]
    classes = rows[0][0].shape[-1]
    kept = labels[labels.ne(IGNORED_LABEL)]
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
        return CrossEntropies()  # other losses than this have such labels
    plain = [_sum_and_count(row, of_row) for row, of_row in rows]
    shifted = plain
    if labels.ndim > 1:
        shifted = [_sum_and_count(row[..., :-1, :], of_row[..., 1:]) for row, of_row in rows]
    return _of_sums(plain, shifted, labels)


@torch.no_grad()
def cross_entropies_of_rows(computed: Sequence[RowLosses], labels: torch.Tensor) -> CrossEntropies:
    """Those that a forward has computed of rows of logits which it did not keep; NaN for others.

    Args:
        computed: nothing is read of several.
        labels: as for `cross_entropies`.
    """
    if len(computed) != 1 or computed[0].ignore_index != IGNORED_LABEL or not len(labels):
        return CrossEntropies()
    losses, of_rows = computed[0].losses, computed[0].labels
    plain = shifted = None
    for shape, given in ((labels.shape, labels), *_shifted(labels)):
        flat = given.reshape(-1).to(of_rows)
        if flat.shape != of_rows.shape or not torch.equal(flat, of_rows):
            continue
        sums = [
            (float(row.sum()), int(of_row.ne(IGNORED_LABEL).sum()))
            for row, of_row in zip(losses.view(shape), given, strict=True)
        ]
        plain, shifted = (sums, shifted) if given is labels else (plain, sums)
    nothing = [(math.nan, 0)] * len(labels)
    if labels.ndim == 1:
        shifted = plain
    return _of_sums(plain or nothing, shifted or nothing, labels)


def _shifted(labels: torch.Tensor) -> list[tuple[torch.Size, torch.Tensor]]:
    """The labels that rows predict from the entry before, of all entries but the last, and of all."""
    if labels.ndim < 2:
        return []
    short = labels[..., 1:]
    long = pad(short, (0, 1), value=IGNORED_LABEL)
    return [(short.shape, short), (long.shape, long)]


def _of_sums(plain: list[tuple[float, int]], shifted: list[tuple[float, int]], labels: torch.Tensor) -> CrossEntropies:
    """Of the sums over each sample's labels, and their numbers."""
    whole, whole_shifted = (sum(total for total, _ in sums) for sums in (plain, shifted))
    return CrossEntropies(
        labels=_mean(plain),
        shifted=_mean(shifted),
        samples=_mean_of_means(plain),
        shifted_samples=_mean_of_means(shifted),
        sums_a_sample=whole / len(plain),
        shifted_sums_a_sample=whole_shifted / len(plain),
        positions=whole / labels.numel(),
        shifted_positions=_ratio(whole_shifted, labels[..., 1:].numel() if labels.ndim > 1 else labels.numel()),
        sum_of_labels=whole,
        sum_of_shifted=whole_shifted,
    )


def _sum_and_count(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits if logits.dtype is torch.float64 else logits.float()
    labels = labels.reshape(-1).long()
    total = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return total.item(), int(labels.ne(IGNORED_LABEL).sum())


def _mean(sums: list[tuple[float, int]]) -> float:
    return _ratio(sum(total for total, _ in sums), sum(count for _, count in sums))


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan


def _mean_of_means(sums: list[tuple[float, int]]) -> float:
    return sum(_ratio(*one) for one in sums) / len(sums)
