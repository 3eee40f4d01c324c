# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`HeadLoss`: the cross entropy of an output head in slices, without its logits.

With logits z_j = x W_j^T + b_j of slice j, a row's loss is logsumexp over all slices of z_j, minus the logit of its
label. The forward keeps the logsumexp of each row; the backward computes the logits of each slice again, as
FlashAttention does with its scores (https://arxiv.org/abs/2205.14135). So a head and its loss need the memory of one
slice's logits.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

from accelerate_lshdp.engine.double_backward import refuse_gradients_of_gradients
from accelerate_lshdp.engine.stores.sliced.operators import is_weight_wanted
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the losses of rows become the result, as options of ``torch.nn.functional.cross_entropy`` say.

    Attributes:
        ignore_index: the label of rows that do not count.
        kind: "mean" over the rows that count, "sum" or "none".
        dtype: of the result.
    """

    ignore_index: int
    kind: str
    dtype: torch.dtype

    @property
    def precision(self) -> torch.dtype:
        """In which losses are computed."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class RowLosses:
    """The losses of the rows of one call; both of shape (rows,).

    Attributes:
        labels: integers.
        losses: 0 where the label does not count.
        ignore_index: the label that does not.
    """

    labels: torch.Tensor
    losses: torch.Tensor
    ignore_index: int


class HeadLoss(torch.autograd.Function):
    """Shapes: x (rows, columns), bias and its values (classes,), labels (rows,); result () or (rows,).

    The values of the bias are a copy: the bias itself may be sharded again when the backward needs them.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sliced: SlicedWeight,
        bias_values: torch.Tensor | None,
        labels: torch.Tensor,
        reduction: Reduction,
        seen: list[RowLosses],
    ) -> torch.Tensor:
        ctx.sliced, ctx.reduction, ctx.version = sliced, reduction, sliced.version
        counts = labels != reduction.ignore_index
        slice_of, place = _find(labels, sliced)
        logsumexp = x.new_full((len(x),), -math.inf, dtype=reduction.precision)
        of_label = torch.full_like(logsumexp, math.nan)
        sliced.announce("forward")  # the same slices as where a rank needs logits
        with without_autocast(x):
            for index in range(sliced.rows.count):
                logits = _logits(x, sliced, sliced.gather(index, x.dtype), index, bias_values, reduction.precision)
                logsumexp = torch.logaddexp(logsumexp, logits.logsumexp(1))
                of_label = logits.gather(1, place[:, None])[:, 0].where(slice_of == index, of_label)
                del logits  # not beside those of the next slice
        losses = (logsumexp - of_label).where(counts, 0)
        # Copies: a script may change what it gets in place, and so its labels.
        seen.append(RowLosses(labels.clone(), losses.clone(), reduction.ignore_index))
        ctx.save_for_backward(x, bias_values, labels, logsumexp)
        if reduction.kind == "none":
            return losses.to(reduction.dtype)
        total = losses.sum()
        return (total / counts.sum() if reduction.kind == "mean" else total).to(reduction.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_gradients_of_gradients()
        x, bias_values, labels, logsumexp = ctx.saved_tensors
        sliced, reduction, rows = ctx.sliced, ctx.reduction, ctx.sliced.rows
        sliced.require_version(ctx.version)
        wants_x, wants_bias, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[2], is_weight_wanted(ctx)
        counts = labels != reduction.ignore_index
        slice_of, place = _find(labels, sliced)
        of_row = gradient.to(logsumexp.dtype) / (counts.sum() if reduction.kind == "mean" else 1)
        # Of a label that is no class, which the loss shows as NaN where the device is not asked for it before.
        of_row = of_row.expand_as(logsumexp).masked_fill(slice_of < 0, math.nan).where(counts, 0)
        of_x = torch.zeros_like(x) if wants_x else None
        of_bias = bias_values.new_empty(1, rows.rows) if wants_bias else None
        # The same as that of logits, but where these need no gradient of x, so no weight.
        sliced.announce("backward" if wants_x else "backward of the loss")
        with without_autocast(x):
            for index in range(rows.count):
                gathered = sliced.gather(index, x.dtype)
                # softmax - 1 for the label, times the row's own gradient.
                of_logits = _logits(x, sliced, gathered, index, bias_values, reduction.precision)
                of_logits.sub_(logsumexp[:, None]).exp_()
                of_logits.scatter_add_(1, place[:, None], -(slice_of == index)[:, None].to(of_logits.dtype))
                of_logits.mul_(of_row[:, None])
                if of_bias is not None:
                    rows.put_columns(of_bias, index, of_logits.sum(0, keepdim=True).to(of_bias.dtype))
                of_logits = of_logits.to(x.dtype)
                if of_x is not None:
                    of_x.addmm_(of_logits, gathered)
                del gathered  # not beside its gradient, nor the next slice
                if wants_weight:
                    sliced.reduce(index, of_logits.t() @ x)
                del of_logits
        return of_x, None, None if of_bias is None else of_bias[0], None, None, None, None, None


def without_autocast(x: torch.Tensor) -> AbstractContextManager[None]:
    """Inside, products have the precision of what they are given: that of the head's call, whatever comes later."""
    return torch.autocast(x.device.type, enabled=False)


def _find(labels: torch.Tensor, sliced: SlicedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The slice of each row's label and its place there; slice -1 where the label is no class."""
    known = (labels >= 0) & (labels < sliced.rows.rows)
    slice_of, place = sliced.rows.find(labels.where(known, 0))
    return slice_of.where(known, -1), place


def _logits(
    x: torch.Tensor,
    sliced: SlicedWeight,
    gathered: torch.Tensor,
    index: int,
    bias_values: torch.Tensor | None,
    precision: torch.dtype,
) -> torch.Tensor:
    """The logits of a slice, shape (rows, gathered); -inf where it has padding."""
    logits = x @ gathered.t()
    if bias_values is not None:
        logits.add_(sliced.rows.take_columns(bias_values[None], index))
    # Rounded as the logits of a whole head are, which a script converts before its loss.
    logits = logits.to(precision)
    padding = torch.ones(sliced.rows.gathered, dtype=torch.bool, device=x.device)
    for start, first, last in sliced.rows.spans(index):
        padding[start : start + last - first] = False
    return logits.masked_fill_(padding, -math.inf)
