# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the loss of a batch would be as one mean or another, computed from the model's own logits.

The logits are those of the forward that the loss is of, with its dropout, so a loss that is one of these equals it to
rounding, and nothing has to be computed again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from accelerate_lshdp.data.labels import IGNORED_LABEL


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
    whole, whole_shifted = (sum(total for total, _ in sums) for sums in (plain, shifted))
    return CrossEntropies(
        labels=_mean(plain),
        shifted=_mean(shifted),
        samples=_mean_of_means(plain),
        shifted_samples=_mean_of_means(shifted),
        sums_a_sample=whole / len(rows),
        shifted_sums_a_sample=whole_shifted / len(rows),
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
