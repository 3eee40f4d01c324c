# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The operators that take a weight in slices: each slice is gathered, used and dropped before the next one.

With the rows W_j of a slice, ``linear`` has output columns x W_j^T, ``matmul`` (rows are input features, as in
transformers' Conv1D) the sum of x_j W_j, and an embedding the rows of those indices that are in the slice. The
backward gathers each slice again, adds its part of the input's gradient, and sums the slice's own gradient over the
ranks at once. Where the input needs no gradient, and for embeddings, it gathers nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from accelerate_lshdp.engine.autograd_task import is_in_autograd
from accelerate_lshdp.engine.double_backward import refuse_gradients_of_gradients
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


#: Of the input; the weight's own is where it belongs when a backward ends, and autograd is not given it.
_Gradients = tuple[torch.Tensor | None, None, None, None]


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As ``torch.nn.functional.linear``; NotImplemented if the slices are not those of the weight."""
    sliced = with_slices(weight, input, bias)
    if sliced is None:
        return NotImplemented
    input, dtype = for_computing(input, sliced)
    output = product(input, weight, dtype)
    return output if bias is None else output.add_(bias)


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x W^T with slices of W in a precision, shape (..., rows)."""
    note_use(weight, x, is_product=True)
    return _Linear.apply(x, weight, weight.sliced, dtype)


def matmul(input: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor:
    """As ``torch.matmul`` without options, with a matrix in slices on the right."""
    sliced = with_slices(other, input)
    if sliced is None or options:
        return NotImplemented
    input, dtype = for_computing(input, sliced)
    note_use(other, input, is_product=True)
    return _Matmul.apply(input, other, sliced, dtype)


def addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **options: Any) -> torch.Tensor:
    """As ``torch.addmm`` without options, with a matrix in slices on the right."""
    if with_slices(mat2, input, mat1) is None or options:
        return NotImplemented
    return matmul(mat1, mat2).add_(input)


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """As ``torch.nn.functional.embedding``, but for norms, frequencies and sparse gradients."""
    sliced = with_slices(weight, input)
    if sliced is None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    rows = sliced.rows.rows
    # Elsewhere such rows are NaN: nothing waits for a device here.
    if input.device.type == "cpu" and input.numel() and not 0 <= int(input.min()) <= int(input.max()) < rows:
        raise IndexError(
            f"found indices from {int(input.min())} to {int(input.max())} for {sliced.name}, expected from 0 to "
            f"{rows - 1}. Correct the batch, or enlarge the embedding"
        )
    # None is no row; a negative one counts from the end.
    padding = -1 if padding_idx is None else padding_idx % rows
    note_use(weight, is_product=False)
    return _Embedding.apply(input, weight, sliced, padding)


def note_use(weight: torch.Tensor, *others: torch.Tensor, is_product: bool) -> None:
    """Tells a weight that a graph is made of its use; not where activations are computed again, in a backward."""
    makes_graph = torch.is_grad_enabled() and any(each.requires_grad for each in (weight, *others))
    if makes_graph and not is_in_autograd():
        weight.sliced.note_use(is_product=is_product)


def with_slices(weight: Any, *others: Any) -> SlicedWeight | None:
    """The slices of ``weight``, if it has some and no other argument has."""
    found, *further = (getattr(each, "sliced", None) for each in (weight, *others))
    if any(isinstance(each, SlicedWeight) for each in further):
        return None
    return found if isinstance(found, SlicedWeight) else None


def for_computing(input: torch.Tensor, sliced: SlicedWeight) -> tuple[torch.Tensor, torch.dtype]:
    """The input and the precision of an operator that autocast may run in a lower one."""
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return input.to(dtype), dtype
    return input, sliced.dtype


# The functions make their results with all dimensions: autograd lets nobody change in place a view that was made
# inside of one, as activations may do.


class _Linear(torch.autograd.Function):
    """x W^T. Shapes: x (..., columns), result (..., rows)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, sliced: SlicedWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.sliced, ctx.dtype, ctx.version = sliced, dtype, sliced.version
        ctx.save_for_backward(x)
        rows, flat = sliced.rows, _flat(x)
        output = x.new_empty(*x.shape[:-1], rows.rows)
        sliced.announce("forward")
        for index in range(rows.count):
            rows.put_columns(_flat(output), index, flat @ sliced.gather(index, dtype).t())
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> _Gradients:
        return gradients_of_product(ctx, gradient), None, None, None


def gradients_of_product(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor | None:
    """The gradient of x in x W^T; that of W is summed over the ranks.

    Args:
        ctx: of a function whose first arguments are x, which it has saved, and the stand-in of W.
        gradient: of the product, shape (..., rows).
    """
    refuse_gradients_of_gradients()
    (x,), sliced, is_wanted = ctx.saved_tensors, ctx.sliced, is_weight_wanted(ctx)
    sliced.require_version(ctx.version)
    flat, gradient = _flat(x), _flat(gradient)
    of_input = torch.zeros_like(flat) if ctx.needs_input_grad[0] else None
    sliced.announce("backward")
    for index in range(sliced.rows.count):
        columns = sliced.rows.take_columns(gradient, index)
        if of_input is not None:
            of_input.addmm_(columns, sliced.gather(index, ctx.dtype))
        if is_wanted:
            sliced.reduce(index, columns.t() @ flat)
    return None if of_input is None else of_input.view(x.shape)


class _Matmul(torch.autograd.Function):
    """x W. Shapes: x (..., rows), result (..., columns)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, sliced: SlicedWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.sliced, ctx.dtype, ctx.version = sliced, dtype, sliced.version
        ctx.save_for_backward(x)
        flat = _flat(x)
        output = x.new_zeros(*x.shape[:-1], sliced.shape[1])
        sliced.announce("forward")
        for index in range(sliced.rows.count):
            _flat(output).addmm_(sliced.rows.take_columns(flat, index), sliced.gather(index, dtype))
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> _Gradients:
        refuse_gradients_of_gradients()
        (x,), sliced, is_wanted = ctx.saved_tensors, ctx.sliced, is_weight_wanted(ctx)
        sliced.require_version(ctx.version)
        flat, gradient = _flat(x), _flat(gradient)
        of_input = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
        sliced.announce("backward")
        for index in range(sliced.rows.count):
            if of_input is not None:
                sliced.rows.put_columns(of_input, index, gradient @ sliced.gather(index, ctx.dtype).t())
            if is_wanted:
                sliced.reduce(index, sliced.rows.take_columns(flat, index).t() @ gradient)
        return None if of_input is None else of_input.view(x.shape), None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of W by their indices. Shapes: indices (...), result (..., columns)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, indices: torch.Tensor, weight: torch.Tensor, sliced: SlicedWeight, padding: int
    ) -> torch.Tensor:
        ctx.sliced, ctx.padding = sliced, padding
        ctx.save_for_backward(indices)
        known = (indices >= 0) & (indices < sliced.rows.rows)
        slice_of, place = sliced.rows.find(indices.where(known, 0))
        slice_of = slice_of.where(known, -1)
        shape = (*indices.shape, sliced.shape[1])
        output = torch.full(shape, math.nan, dtype=sliced.dtype, device=sliced.device)
        sliced.announce("forward of rows")
        for index in range(sliced.rows.count):
            wanted, gathered = slice_of == index, sliced.gather(index, sliced.dtype)
            if indices.device.type == "cpu":
                output[wanted] = gathered[place[wanted]]
            else:  # all of them: how many are wanted is not known without waiting for the device
                output = torch.where(wanted[..., None], functional.embedding(place, gathered), output)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> _Gradients:
        refuse_gradients_of_gradients()
        (indices,), sliced = ctx.saved_tensors, ctx.sliced
        sliced.announce("backward of rows")
        nowhere = (indices == ctx.padding) | (indices < 0) | (indices >= sliced.rows.rows)
        sliced.reduce_rows(indices.masked_fill(nowhere, -1), gradient)
        return None, None, None, None


def is_weight_wanted(ctx: FunctionCtx) -> bool:
    """Whether this backward is to give the weight a gradient: `autograd.grad` of activations is not."""
    # What autograd would tell its own functions. A Python function learns of its forward only.
    return ctx.needs_input_grad[1] and torch._C._will_engine_execute_node(ctx.next_functions[1][0])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a matrix of its last dimension; a view where its memory allows."""
    return tensor.reshape(-1, tensor.shape[-1])
