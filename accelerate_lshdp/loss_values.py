# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the loss of a batch would be as one mean or another, computed from the model's own logits.

The logits are those of the forward that the loss is of, with its dropout, so a loss that is one of these equals it to
rounding, and nothing has to be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node
from torch.nn.functional import cross_entropy

from accelerate_lshdp.weighting import IGNORED_LABEL


class CrossEntropies(NamedTuple):
    """Of one batch; NaN for what it cannot be."""

    labels: float = math.nan
    """The mean over labels."""
    shifted: float = math.nan
    """The mean over labels but the first of each row, each predicted from the entry before it."""
    samples: float = math.nan
    """The mean over samples of each one's mean over its labels."""
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
    means = [total / count if count else math.nan for total, count in plain]
    return CrossEntropies(
        labels=_mean(plain),
        shifted=_mean(shifted),
        samples=sum(means) / len(means),
        sum_of_labels=sum(total for total, _ in plain),
        sum_of_shifted=sum(total for total, _ in shifted),
    )


def _sum_and_count(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    logits = logits.reshape(-1, logits.shape[-1])
    logits = logits if logits.dtype is torch.float64 else logits.float()
    labels = labels.reshape(-1).long()
    total = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return total.item(), int(labels.ne(IGNORED_LABEL).sum())


def _mean(sums: list[tuple[float, int]]) -> float:
    count = sum(count for _, count in sums)
    return sum(total for total, _ in sums) / count if count else math.nan


class Forward(NamedTuple):
    """What is kept of a model's forward until its backward, without what the backward needs."""

    labels: torch.Tensor | None
    """Integer labels that it was given."""
    items: float = math.nan
    """The number that it was told to divide its loss by."""
    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    """Its own loss."""
    origin: Node | None = None
    """Where that comes from in the graph."""
    auxiliary: float = 0.0
    """The part of the loss that balances a mixture of experts."""

    @classmethod
    def of(cls, model: Any, labels: torch.Tensor | None, items: Any, output: Any) -> Forward:
        """Of what a model was given and returned; what it means is found out later."""
        items = _number(items)
        if torch.is_tensor(output):
            return cls(labels, items, output.detach())
        logits, loss = _entry(output, "logits"), _entry(output, "loss")
        logits = None if logits is None else logits.detach()
        if loss is None or loss.numel() != 1:
            return cls(labels, items, logits)
        auxiliary = _entry(output, "aux_loss")
        factor = getattr(getattr(model, "config", None), "router_aux_loss_coef", None)
        part = _number(factor) * _number(auxiliary)
        part = part if math.isfinite(part) else 0.0
        return cls(labels, items, logits, loss.detach(), loss.grad_fn, part)

    def multiple(self, loss: torch.Tensor) -> float:
        """By what the model's own loss was multiplied to make this one; NaN if it was made in another way."""
        if self.loss is None or self.origin is None or loss.numel() != 1 or not _leads_to(loss.grad_fn, self.origin):
            return math.nan
        own = self.loss.item()
        return loss.item() / own if own else math.nan


#: Operations with one number that make a multiple of it, or leave it as it is.
_MULTIPLYING = ("MulBackward0", "DivBackward0", "ToCopyBackward0", "CloneBackward0", "NegBackward0")
_SHAPING = ("MeanBackward0", "SumBackward0", "SqueezeBackward0", "ViewBackward0", "ReshapeAliasBackward0")


def _leads_to(node: Node | None, origin: Node) -> bool:
    while node is not None and node is not origin:
        before = [one for one, _ in node.next_functions if one is not None]
        if node.name() not in _MULTIPLYING + _SHAPING or len(before) != 1:
            return False
        node = before[0]
    return node is origin


def _number(value: Any) -> float:
    """NaN for what is none."""
    if torch.is_tensor(value):
        return float(value) if value.numel() == 1 else math.nan
    return float(value) if isinstance(value, int | float) else math.nan


def _entry(output: Any, name: str) -> torch.Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if torch.is_tensor(value) else None
