# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SlicedLogits`: the logits of an output head in slices, which are not computed before something needs them.

Most models hand their logits to a cross entropy and return them beside its result, and nobody looks at them. In such a
forward they need no memory: views and casts of them are remembered, and the loss is computed slice by slice
(`head_loss`). Whatever else a model or a script does with them gets a tensor with their values.

They are nodes of autograd's graph like the tensors that they stand for: what takes them without asking for their
values, such as a function of autograd that a script has written, gives its gradient to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from accelerate_lshdp.engine.stores.sliced.head_loss import HeadLoss, Reduction, RowLosses, without_autocast
from accelerate_lshdp.engine.stores.sliced.operators import (
    for_computing,
    gradients_of_product,
    linear,
    product,
    with_slices,
)
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


#: What an operator does with a tensor.
_Change = Callable[[torch.Tensor], torch.Tensor]
#: What is known of logits without their values.
_KNOWN = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta", "_base")),
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
        self.sliced: SlicedWeight = weight.sliced
        # The bias itself has no memory where its unit is sharded again.
        self.bias_values = None if bias is None else bias.detach().clone()
        self._versions = self._versions_now()
        self._forward = self.sliced.forwards
        self._made: list[weakref.ref[SlicedLogits]] = []
        self._has_values = False
        self._is_in_forward = True

    def _versions_now(self) -> tuple[int, ...]:
        return (*self.sliced.version, self.x._version)

    @property
    def can_wait(self) -> bool:
        """Whether its logits may still turn out not to be needed: while the model's forward runs."""
        return self._is_in_forward and not self._has_values

    @property
    def is_returned(self) -> bool:
        """Whether its logits were returned by the model, and nothing has needed them."""
        return not self._is_in_forward and not self._has_values

    @property
    def has_values(self) -> bool:
        """Whether its logits were computed."""
        return self._has_values

    @property
    def was_used(self) -> bool:
        """Whether a loss was computed of it without its logits."""
        return bool(self.losses)

    def add(self, logits: SlicedLogits) -> None:
        """Takes note of logits, or a view or a copy of them, that wait."""
        self._made.append(weakref.ref(logits))

    def leave_forward(self) -> None:
        """Says that the model's forward has ended: what comes is the script's."""
        self._is_in_forward = False

    def require_unchanged(self) -> None:
        """Raises RuntimeError if what the logits are computed from has changed since the call."""
        if self._versions_now() == self._versions:
            return
        what = "its input" if self._versions_now()[:-1] == self._versions[:-1] else "its weight"
        raise RuntimeError(
            f"found the logits of {self.sliced.name} in use after {what} had changed, expected it before: logits of a "
            "head in slices are not kept. Use them before (those of an output before the optimizer's step), or give "
            'the unit of the head "slices": 1 in the placement'
        )

    def compute(self) -> None:
        """Computes the logits (collective), and all that was made of them, once.

        Raises:
            RuntimeError: the weight or the input has changed since the call, or other ranks do not ask for them.
        """
        if self._has_values:
            return
        self.require_unchanged()
        if not self._is_in_forward:
            self.sliced.read_logits(self._forward)
        # All at once and in the order in which they were made: something may change one of them in place from now on,
        # which copies must not see and views must.
        for reference in self._made:
            logits = reference()
            if logits is not None:
                logits.take_values()
        self._made.clear()
        self._has_values = True

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """The logits without a graph (collective), shape (..., classes)."""
        with without_autocast(self.x):
            output = product(self.x, self.weight, self.x.dtype)
        return output if self.bias_values is None else output.add_(self.bias_values)


class SlicedLogits(torch.Tensor):
    """Logits, or a view or a cast of them, that are computed where something needs their values.

    Args:
        call: of the head.
        x: the part of the head's input that they are of, shape (..., columns).
        dtype: their precision.
        parent: the logits that they were made from, and how; None: they are those of the call.
        is_aside: whether they are the result of a function of autograd that is not known, so that their gradient has
            to pass through it: a loss of them needs their values.
    """

    @staticmethod
    def __new__(
        cls,
        call: HeadCall,
        x: torch.Tensor,
        dtype: torch.dtype,
        parent: tuple[SlicedLogits, _Change] | None = None,
        is_aside: bool = False,
    ) -> SlicedLogits:
        # Autograd says whether they require a gradient, as they are results of its functions.
        return torch.Tensor._make_wrapper_subclass(
            cls, (*x.shape[:-1], call.sliced.shape[0]), dtype=dtype, device=x.device, requires_grad=False
        )

    def __init__(
        self,
        call: HeadCall,
        x: torch.Tensor,
        dtype: torch.dtype,
        parent: tuple[SlicedLogits, _Change] | None = None,
        is_aside: bool = False,
    ) -> None:
        self.call = call
        self.x = x
        self.is_aside = is_aside
        self._parent = parent
        self._values: torch.Tensor | None = None
        self._hooks: list[_Change] = []
        call.add(self)

    def take_values(self) -> None:
        """Computes the values of these logits from those of their parent."""
        if self._values is not None:
            return
        # With their graph, whatever needs them first: a metric, and then a loss. What is saved here is not what
        # checkpointing counts: when it computes again, the values are there.
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            if self._parent is None:
                self._values = _Values.apply(self, None)
                return
            parent, change = self._parent
            parent.take_values()
            if self.is_aside:
                self._values = _Values.apply(self, change(parent._values.detach()))
                return
            self._values = change(parent._values)
            for hook in self._hooks:  # this gradient does not pass through their own node
                self._values.register_hook(hook)

    def values(self) -> torch.Tensor:
        """A tensor with their values (collective the first time); raises as `HeadCall.compute`."""
        self.call.compute()
        self.take_values()  # those that were made later
        return self._values

    def add_hook(self, hook: _Change) -> RemovableHandle:
        """Calls a hook with the gradient of logits that were returned, as FSDP2 does it: no reason to compute them."""
        if self._parent is not None and not self.is_aside:
            self._hooks.append(hook)
        with torch._C.DisableTorchFunctionSubclass():
            return self.register_hook(hook)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if func is torch.Tensor.register_hook and args[0].call.is_returned:
            return args[0].add_hook(*args[1:], **keywords)
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
        logits = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SlicedLogits))
        # Below autograd, which has noted what it has to know.
        if func in _THE_SAME or (func is torch.ops.aten.view.default and tuple(args[1]) == tuple(logits.shape)):
            parent = logits, lambda tensor: tensor.view_as(tensor)
            return SlicedLogits(logits.call, logits.x, logits.dtype, parent, is_aside=True)
        if func.namespace == "c10d" and logits.call.has_values:  # collectives have no gradient
            args, keywords = tree_map_only(SlicedLogits, lambda each: each.values().detach(), (args, kwargs or {}))
            return func(*args, **keywords)
        raise RuntimeError(
            f"found the logits of {logits.call.sliced.name}, which is in slices, in {func}, which takes them past "
            "what computes their values. Give it logits.clone()"
        )

    def __repr__(self, **_: Any) -> str:
        return f"SlicedLogits({self.call.sliced.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


_THE_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def head(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As ``torch.nn.functional.linear`` with a weight in slices; its result may wait for what needs it."""
    sliced = with_slices(weight, input, bias)
    waits = sliced is not None and sliced.waiting is not None and torch.is_grad_enabled() and not _is_checkpointed()
    if not waits:
        return linear(input, weight, bias)
    x, dtype = for_computing(input, sliced)
    if x.dtype is not dtype:
        return linear(input, weight, bias)  # it says what is wrong
    call = HeadCall(x, weight, bias)
    sliced.waiting.append(call)
    return _Head.apply(x, weight, bias, call)


def settle_outputs(output: Any) -> Any:
    """What a model's forward has returned, with tensors for logits that no loss was computed of."""

    def settled(logits: SlicedLogits) -> torch.Tensor:
        return logits if logits.call.was_used else logits.values()

    if any(isinstance(leaf, SlicedLogits) and not leaf.call.was_used for leaf in tree_leaves(output)):
        return tree_map_only(SlicedLogits, settled, output)
    return output


def plain_loss(
    input: torch.Tensor,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **others: Any,
) -> Reduction | None:
    """What ``torch.nn.functional.cross_entropy`` is to compute, if a head in slices can do it without logits.

    It can for a matrix of logits and integer labels, without class weights and label smoothing.
    """
    integers = isinstance(target, torch.Tensor) and target.dtype is torch.long and target.device == input.device
    options = weight is not None or size_average is not None or reduce is not None or label_smoothing or others
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


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_checkpointed() -> bool:
    """Whether somebody handles what autograd saves, as checkpointing does, which computes again what it was."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _without_values(func: Callable[..., Any], args: tuple, keywords: dict[str, Any]) -> Any:
    """The result of an operator on logits that needs no values of them; NotImplemented if it does."""
    logits, others = args[0], args[1:]
    # What is made without a gradient has none later, so it is not what a loss is computed of.
    if logits.is_aside or logits.call.has_values or not torch.is_grad_enabled():
        return NotImplemented
    if func in _CASTING:
        return _cast(func, logits, others, keywords)
    if not logits.call.can_wait:
        return NotImplemented
    if func in _SHAPING:
        return _shaped(func, logits, others, keywords)
    if func is torch.Tensor.__getitem__:
        return _indexed(logits, *others)
    if func is torch.Tensor.contiguous and not others and not keywords:
        return _Changed.apply(logits, logits.x, func, logits.dtype)
    if func is functional.cross_entropy:
        return _cross_entropy(*args, **keywords)
    return NotImplemented


def _cast(func: Callable[..., Any], logits: SlicedLogits, others: tuple, keywords: dict[str, Any]) -> Any:
    given = (*others, *keywords.values())
    if any(not isinstance(each, (torch.dtype, torch.device, str, torch.Tensor)) for each in given):
        return NotImplemented
    like = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *others, **keywords)
    # A loss is computed in the higher precision at once, so no digits may be lost on the way to it.
    gains = torch.promote_types(like.dtype, logits.dtype) is like.dtype
    if like.device != logits.device or not gains:
        return NotImplemented
    if like.dtype is logits.dtype:
        return logits
    return _Changed.apply(logits, logits.x, lambda tensor: func(tensor, *others, **keywords), like.dtype)


def _shaped(func: Callable[..., Any], logits: SlicedLogits, others: tuple, keywords: dict[str, Any]) -> Any:
    like = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *others, **keywords)
    if like.dtype is not logits.dtype or not like.ndim or like.shape[-1] != logits.shape[-1]:
        return NotImplemented
    # The classes are the last dimension before and after, so the rows stay in their order.
    x = logits.x.reshape(*like.shape[:-1], logits.x.shape[-1])
    return _Changed.apply(logits, x, lambda tensor: func(tensor, *others, **keywords), logits.dtype)


def _indexed(logits: SlicedLogits, index: Any) -> Any:
    entries = index if isinstance(index, tuple) else (index,)
    if not entries or not all(entry is Ellipsis or type(entry) in (int, slice) for entry in entries):
        return NotImplemented
    dots = sum(entry is Ellipsis for entry in entries)
    others = len(entries) - dots
    # The classes are reached by the last entry: after dots, or if there are as many entries as dimensions.
    reaches_classes = others == logits.ndim or (dots and entries[-1] is not Ellipsis)
    if dots > 1 or (reaches_classes and (entries[-1] is Ellipsis or entries[-1] != slice(None))):
        return NotImplemented
    return _Changed.apply(logits, logits.x[index], lambda tensor: tensor[index], logits.dtype)


def _cross_entropy(logits: SlicedLogits, target: Any, *others: Any, **keywords: Any) -> Any:
    reduction = plain_loss(logits, target, *others, **keywords)
    if reduction is None or _is_checkpointed():
        return NotImplemented
    call, classes = logits.call, logits.shape[-1]
    call.require_unchanged()
    if target.device.type == "cpu":  # elsewhere the loss is NaN: nothing waits for a device here
        wrong = target[(target != reduction.ignore_index) & ((target < 0) | (target >= classes))]
        if len(wrong):
            raise IndexError(
                f"found label {int(wrong[0])}, expected one from 0 to {classes - 1}, or {reduction.ignore_index}"
            )
    return HeadLoss.apply(
        logits.x, call.weight, call.bias, call.sliced, call.bias_values, target, reduction, call.losses
    )


class _Head(torch.autograd.Function):
    """The node of logits that wait: their gradient is that of a product and a bias."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: HeadCall
    ) -> SlicedLogits:
        ctx.sliced, ctx.dtype = call.sliced, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x)
        return SlicedLogits(call, call.x, x.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_input = gradients_of_product(ctx, gradient)
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return of_input, None, of_bias, None


class _Changed(torch.autograd.Function):
    """The node of what an operator makes of logits that wait."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: SlicedLogits, x: torch.Tensor, change: _Change, dtype: torch.dtype
    ) -> SlicedLogits:
        ctx.change, ctx.like = change, (logits.shape, logits.dtype, logits.device)
        return SlicedLogits(logits.call, x, dtype, (logits, change))

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shape, dtype, device = ctx.like
        with torch.enable_grad():
            before = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            after = ctx.change(before)
        return torch.autograd.grad(after, before, gradient)[0], None, None, None


class _Values(torch.autograd.Function):
    """Values of logits: their gradient is that of what waited. None: they are those of the call."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: SlicedLogits, values: torch.Tensor | None) -> torch.Tensor:
        return logits.call.logits() if values is None else values

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
