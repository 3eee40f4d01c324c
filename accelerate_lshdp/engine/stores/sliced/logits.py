# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SlicedLogits`: the logits of an output head in slices, which are not computed before something needs them.

Most models hand their logits to a cross entropy and return them beside its result, and nobody looks at them. In such a
forward they need no memory: views and casts of them are remembered, and the loss is computed slice by slice
(`head_loss`). Whatever else a model or a script does with them gets a tensor with their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from accelerate_lshdp.engine.stores.sliced.head_loss import HeadLoss, Reduction, RowLosses
from accelerate_lshdp.engine.stores.sliced.operators import for_computing, linear, product, with_slices
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


#: What an operator does with a tensor.
_Change = Callable[[torch.Tensor], torch.Tensor]
#: What is known of logits without their values.
_KNOWN = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "element_size", "__len__")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex")),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_SHAPING = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten}
_CASTING = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.to}


class HeadCall:
    """One call of a head: what its logits are computed from.

    Args:
        x: input of the head in the precision in which it computes, shape (..., columns).
        weight: the stand-in of its weight, of shape (classes, columns).
        bias: shape (classes,).

    Attributes:
        losses: of all cross entropies that were computed of its logits.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.losses: list[RowLosses] = []
        # The bias itself has no memory where its unit is sharded again.
        self.bias_values = None if bias is None else bias.detach().clone()
        self._version = self._versions()
        self._values: torch.Tensor | None = None
        self._is_in_forward = True

    def _versions(self) -> tuple:
        return (*self.sliced.version, self.x._version)

    @property
    def sliced(self) -> SlicedWeight:
        return self.weight.sliced

    @property
    def can_wait(self) -> bool:
        """Whether its logits may still turn out not to be needed: while the model's forward runs."""
        return self._is_in_forward and self._values is None

    @property
    def was_used(self) -> bool:
        """Whether a loss was computed of it without its logits."""
        return bool(self.losses)

    def leave_forward(self) -> None:
        """Says that the model's forward has ended: what comes is the script's."""
        self._is_in_forward = False

    def values(self) -> torch.Tensor:
        """The logits (collective the first time), shape (..., classes).

        Raises:
            RuntimeError: the weight or the input has changed since the call, or other ranks do not ask for them.
        """
        if self._values is None:
            if self._versions() != self._version:
                raise RuntimeError(
                    f"found the logits of {self.sliced.name} in use after this weight, or what it was multiplied "
                    "with, had changed, expected it before the optimizer's step: they are not kept, as the head is in "
                    "slices and so is its loss. Read them before the step, or give the unit of the head "
                    '"slices": 1 in the placement'
                )
            if not self._is_in_forward:
                self.sliced.read_logits()
            # With their graph, whatever needs them first: a metric, and then a loss.
            with torch.enable_grad():
                logits = product(self.x, self.weight, self.x.dtype)
                self._values = logits if self.bias is None else _AddBias.apply(logits, self.bias, self.bias_values)
        return self._values


class SlicedLogits(torch.Tensor):
    """Logits, or a view or a cast of them, that are computed where something needs their values.

    Args:
        call: of the head.
        x: the part of the head's input that they are of, shape (..., columns).
        dtype: their precision.
        parent: the logits that they were made from, and how; None: they are those of the call.
    """

    @staticmethod
    def __new__(
        cls, call: HeadCall, x: torch.Tensor, dtype: torch.dtype, parent: tuple[SlicedLogits, _Change] | None = None
    ) -> SlicedLogits:
        # No gradient passes through it: that of a loss passes through the head's input, that of values through them.
        return torch.Tensor._make_wrapper_subclass(
            cls, (*x.shape[:-1], call.sliced.shape[0]), dtype=dtype, device=x.device, requires_grad=False
        )

    def __init__(
        self, call: HeadCall, x: torch.Tensor, dtype: torch.dtype, parent: tuple[SlicedLogits, _Change] | None = None
    ) -> None:
        self.call = call
        self.x = x
        self._parent = parent
        self._values: torch.Tensor | None = None

    def changed(self, x: torch.Tensor, change: _Change, dtype: torch.dtype | None = None) -> SlicedLogits:
        """What an operator makes of them."""
        return SlicedLogits(self.call, x, dtype or self.dtype, (self, change))

    def values(self) -> torch.Tensor:
        """A tensor with their values (collective the first time); raises as `HeadCall.values`."""
        if self._parent is None:
            return self.call.values()
        if self._values is None:  # kept, and made of those of the parent, as something may change them in place
            parent, change = self._parent
            # With its graph, whatever needs them first: what comes later may need their gradient.
            with torch.enable_grad():
                self._values = change(parent.values())
        return self._values

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        result = NotImplemented
        if args and isinstance(args[0], SlicedLogits):
            result = _without_values(func, args, keywords)
        if result is not NotImplemented:
            return result
        args, keywords = tree_map_only(SlicedLogits, SlicedLogits.values, (args, keywords))
        return func(*args, **keywords)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":  # a collective, which has no gradient
            args, keywords = tree_map_only(SlicedLogits, lambda logits: logits.values().detach(), (args, kwargs or {}))
            return func(*args, **keywords)
        # Below autograd: values would come without their gradient.
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SlicedLogits))
        raise RuntimeError(
            f"found the logits of {found.call.sliced.name}, which is in slices, in {func}, which takes them past what "
            "computes their values. Give it logits.clone()"
        )

    def __repr__(self, **_: Any) -> str:
        return f"SlicedLogits({self.call.sliced.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def head(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As ``torch.nn.functional.linear`` with a weight in slices; its result may wait for what needs it."""
    sliced = with_slices(weight, input, bias)
    if sliced is None or sliced.waiting is None or not torch.is_grad_enabled():
        return linear(input, weight, bias)
    x, dtype = for_computing(input, sliced)
    if x.dtype is not dtype:
        return linear(input, weight, bias)  # it says what is wrong
    call = HeadCall(x, weight, bias)
    sliced.waiting.append(call)
    return SlicedLogits(call, x, dtype)


def settle_outputs(output: Any) -> Any:
    """What a model's forward has returned, with tensors for logits that no loss was computed of."""

    def settled(logits: SlicedLogits) -> torch.Tensor:
        return logits if logits.call.was_used else logits.values()

    if any(isinstance(leaf, SlicedLogits) and not leaf.call.was_used for leaf in tree_leaves(output)):
        return tree_map_only(SlicedLogits, settled, output)
    return output


def _without_values(func: Callable[..., Any], args: tuple, keywords: dict[str, Any]) -> Any:
    """The result of an operator on logits that needs no values of them; NotImplemented if it does."""
    logits, others = args[0], args[1:]
    if func in _CASTING:
        return _cast(func, logits, others, keywords)
    if not logits.call.can_wait:
        return NotImplemented
    if func in _SHAPING:
        return _shaped(func, logits, others, keywords)
    if func is torch.Tensor.__getitem__:
        return _indexed(logits, *others)
    if func is torch.Tensor.contiguous and not others and not keywords:
        return logits.changed(logits.x, func)
    if func is functional.cross_entropy:
        return _cross_entropy(*args, **keywords)
    return NotImplemented


def _cast(func: Callable[..., Any], logits: SlicedLogits, others: tuple, keywords: dict[str, Any]) -> Any:
    like = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *others, **keywords)
    # A loss is computed in the higher precision at once, so no digits may be lost on the way to it.
    gains = torch.promote_types(like.dtype, logits.dtype) is like.dtype
    if like.device != logits.device or keywords.get("copy") or not gains:
        return NotImplemented
    if like.dtype is logits.dtype:
        return logits
    return logits.changed(logits.x, lambda tensor: func(tensor, *others, **keywords), like.dtype)


def _shaped(func: Callable[..., Any], logits: SlicedLogits, others: tuple, keywords: dict[str, Any]) -> Any:
    like = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *others, **keywords)
    if like.dtype is not logits.dtype or not like.ndim or like.shape[-1] != logits.shape[-1]:
        return NotImplemented
    # The classes are the last dimension before and after, so the rows stay in their order.
    x = logits.x.reshape(*like.shape[:-1], logits.x.shape[-1])
    return logits.changed(x, lambda tensor: func(tensor, *others, **keywords))


def _indexed(logits: SlicedLogits, index: Any) -> Any:
    entries = index if isinstance(index, tuple) else (index,)
    if not entries or not all(entry is Ellipsis or type(entry) in (int, slice) for entry in entries):
        return NotImplemented
    has_dots = any(entry is Ellipsis for entry in entries)
    reaches_classes = entries[-1] is not Ellipsis and (has_dots or len(entries) == logits.ndim)
    if reaches_classes and entries[-1] != slice(None):
        return NotImplemented
    return logits.changed(logits.x[index], lambda tensor: tensor[index])


def _cross_entropy(logits: SlicedLogits, target: Any, *others: Any, **keywords: Any) -> Any:
    reduction = plain_loss(logits, target, *others, **keywords)
    if reduction is None:
        return NotImplemented
    classes = logits.shape[-1]
    if target.device.type == "cpu":  # elsewhere its loss is NaN: nothing waits for a device here
        wrong = target[(target != reduction.ignore_index) & ((target < 0) | (target >= classes))]
        if len(wrong):
            raise IndexError(
                f"found label {int(wrong[0])}, expected one from 0 to {classes - 1}, or {reduction.ignore_index}"
            )
    call = logits.call
    return HeadLoss.apply(
        logits.x, call.weight, call.bias, call.sliced, call.bias_values, target, reduction, call.losses
    )


def plain_loss(
    input: torch.Tensor,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Reduction | None:
    """What ``torch.nn.functional.cross_entropy`` is to compute, if a head in slices can do it without logits.

    It can for a matrix of logits and integer labels, without class weights and label smoothing.
    """
    integers = isinstance(target, torch.Tensor) and target.dtype is torch.long and target.device == input.device
    options = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if not integers or options or input.ndim != 2 or target.shape != input.shape[:1]:
        return None
    if reduction not in ("mean", "sum", "none"):
        return None
    # Autocast computes this loss in fp32.
    is_autocast = torch.is_autocast_enabled(input.device.type)
    dtype = torch.promote_types(input.dtype, torch.float32) if is_autocast else input.dtype
    return Reduction(ignore_index, reduction, dtype)


def leaves_rows(func: Callable[..., Any], before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether an operator on logits can wait for what needs their values, as far as its result shows."""
    if func not in {*_SHAPING, *_CASTING, torch.Tensor.__getitem__, torch.Tensor.contiguous}:
        return False
    gains = torch.promote_types(before.dtype, after.dtype) is after.dtype
    return gains and bool(after.ndim) and after.shape[-1] == before.shape[-1]


class _AddBias(torch.autograd.Function):
    """Adds the values of a bias in place. The bias itself may be sharded again; it takes the gradient all the same."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, bias: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.dtype = bias.dtype
        ctx.mark_dirty(logits)
        return logits.add_(values)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        of_bias = gradient.flatten(0, -2).sum(0).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return gradient, of_bias, None
