# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SlicedLogits`: the logits of an output head in slices, which are not computed before something needs them.

Most models hand their logits to a cross entropy and return them beside its result, and nobody looks at them. In such a
forward they need no memory: views and casts of them are remembered, and the loss is computed slice by slice
(`head_loss`). Whatever else a model or a script does with them makes them the tensor that they would have been: the
object stays, and is an ordinary tensor from then on, so nothing has to be said here of what can be done with one.

Functions of autograd take tensors past Python, and hold what they are given. They find the operations whose results
the logits are, and so give their gradient to these. As long as something holds logits, another tensor has their
values, and nothing may change it in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn import functional
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves, tree_map_only

from accelerate_lshdp.engine.stores.sliced.head_call import HeadCall, computing, held
from accelerate_lshdp.engine.stores.sliced.head_loss import HeadLoss
from accelerate_lshdp.engine.stores.sliced.operators import (
    for_computing,
    gradients_of_product,
    linear,
    note_use,
    with_slices,
)
from accelerate_lshdp.engine.stores.sliced.without_values import (
    CONSTANT,
    KNOWN,
    WaitingChange,
    is_checkpointed,
    plain_loss,
    waiting_change,
)


#: What asks for the gradient of tensors.
_OF_GRADIENTS = {
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.autograd.grad,
}


class SlicedLogits(torch.Tensor):
    """Logits, or a view or a cast of them, that become a tensor where something needs their values.

    Args:
        call: of the head.
        x: the part of the head's input that they are of, shape (..., columns).
        dtype: their precision.
        parent: the logits that they were made from, and how; None: they are those of the call.
    """

    @staticmethod
    def __new__(
        cls,
        call: HeadCall,
        x: torch.Tensor,
        dtype: torch.dtype,
        parent: tuple[SlicedLogits, WaitingChange] | None = None,
    ) -> SlicedLogits:
        # Autograd says that they require a gradient, as results of its functions.
        return torch.Tensor._make_wrapper_subclass(
            cls, (*x.shape[:-1], call.sliced.shape[0]), dtype=dtype, device=x.device, requires_grad=False
        )

    def __init__(
        self,
        call: HeadCall,
        x: torch.Tensor,
        dtype: torch.dtype,
        parent: tuple[SlicedLogits, WaitingChange] | None = None,
    ) -> None:
        self.call = call
        self.x = x
        self._parent = parent
        #: Which rows of the call's are left out; see `WaitingChange`.
        self.leaves_out: int = 0 if parent is None else parent[0].leaves_out + parent[1].leaves_out
        self._fsdp_hooks: list[Callable[[torch.Tensor], Any]] = []
        #: Called with the values when they are computed.
        self.on_values: list[Callable[[torch.Tensor], None]] = []
        self._twin: torch.Tensor | None = None
        self._version_of_twin = 0
        call.add(self)
        self._own_attributes = {*vars(self), "_own_attributes"}

    @property
    def operation(self) -> Node:
        """What the logits of the call are the result of; everything that is made of them leads there."""
        if self._parent is not None:
            return self._parent[0].operation
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    def is_held(self, but_for_references: int = 0) -> bool:
        """Whether something beside Python's variables holds these logits, so that they cannot become their values."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._use_count() > 1 or weakref.getweakrefcount(self) > but_for_references

    def twin(self) -> torch.Tensor:
        """A tensor with their values, which nobody may change (collective the first time).

        Raises:
            RuntimeError: somebody has.
        """
        if self._twin is None:
            with computing():
                self._twin = self._make_values()
            self._version_of_twin = self._twin._version
        if self._twin._version != self._version_of_twin:
            raise RuntimeError(held(self.call.sliced.name))
        return self._twin

    @property
    def known(self) -> torch.Tensor | None:
        """Their values without a graph, if something has needed them; no collective."""
        return None if self._twin is None else self.twin().detach()

    def _make_values(self) -> torch.Tensor:
        if self._parent is not None:
            parent, change = self._parent
            values = change.of_values(parent.twin() if type(parent) is SlicedLogits else parent)
        else:
            self.call.before_values()
            values = _Values.apply(self, self.call)
        for told in self.on_values:
            told(values)
        return values

    @torch.no_grad()
    def numbers(self) -> torch.Tensor:
        """Their values where autograd cannot note what they come from (collective)."""
        if self._twin is not None:
            return self.twin().detach()
        if self._parent is None:
            self.call.before_values()
            return self.call.logits()
        parent, change = self._parent
        return change.of_values(parent.numbers() if type(parent) is SlicedLogits else parent.detach())

    def watch(self, hook: Callable[[torch.Tensor], Any]) -> None:
        """Calls a hook of FSDP2 with the gradient of logits that were returned, whichever way it takes."""
        self._fsdp_hooks.append(hook)
        with torch._C.DisableTorchFunctionSubclass():
            self.register_hook(hook)

    def is_watched_by(self, hook: Callable[[torch.Tensor], Any]) -> bool:
        """Whether a hook was registered with `watch`."""
        return hook in self._fsdp_hooks

    def become_values(self) -> None:
        """Makes this object an ordinary tensor with a graph; its parent is one already."""
        call, hooks, parent = self.call, self._fsdp_hooks, self._parent and self._parent[0]
        values = self._make_values() if self._twin is None else self.twin()
        if values is parent or values is self._twin:  # two objects cannot be one
            values = values.view_as(values)
        for hook in hooks if parent is not None else ():  # this gradient does not pass through their own operation
            values.register_hook(hook)
        if call.was_used:
            values = values.as_subclass(UsedLogits)
        # What a script has set stays.
        vars(values).update((name, value) for name, value in vars(self).items() if name not in self._own_attributes)
        with torch._C.DisableTorchFunctionSubclass():
            self._backward_hooks = None  # else those that are registered later would be added to these
        swap_tensors(self, values)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        if func in CONSTANT:
            return CONSTANT[func]
        if args and isinstance(args[0], SlicedLogits):
            logits, others = args[0], args[1:]
            if func is torch.Tensor.register_hook and logits.call.was_used and _is_of_fsdp2(others[0]):
                return logits.watch(others[0])
            result = logits._without_values(func, others, keywords)
            if result is not None:
                return result
        found = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, SlicedLogits)]
        for logits in found:
            if logits.call.was_used:
                _refuse_gradients(func)
        if found and not all(logits.call.can_compute() for logits in found):
            args, keywords = tree_map_only(SlicedLogits, SlicedLogits.twin, (args, keywords))
            result = func(*args, **keywords)
            for logits in found:
                logits.twin()  # not changed, or that is an error
            return result
        for logits in found:
            # Another one of the same call has made it a tensor by now.
            if type(logits) is SlicedLogits:
                logits.call.compute()
        if not found or any(type(logits) is SlicedLogits for logits in found):
            raise RuntimeError(held("a head"))
        return func(*args, **keywords)

    def _without_values(self, func: Callable[..., Any], others: tuple, keywords: dict[str, Any]) -> Any:
        """The result of an operator on these logits that needs no values of them; None if it does."""
        self.call.require_unchanged_twins()
        if not torch.is_grad_enabled():
            return None  # what is made without a gradient has none later, so it is not what a loss is computed of
        if func is functional.cross_entropy:
            return self._loss(*others, **keywords)
        change = waiting_change(func, self, others, keywords)
        if change is None or not (self.call.can_wait or change.is_cast):
            return None
        if change.is_cast and change.dtype is self.dtype:
            return self
        return _Changed.apply(self, change)

    def _loss(self, target: Any, *others: Any, **keywords: Any) -> torch.Tensor | None:
        reduction = plain_loss(self, target, *others, **keywords)
        call, classes = self.call, self.shape[-1]
        # Losses of parts, such as chunks, are computed of values: ranks with other batches have other numbers of them,
        # but all ranks need as many gathers.
        if reduction is None or not call.can_wait or self.leaves_out > 1:
            return None
        call.require_unchanged()
        if target.device.type == "cpu":  # elsewhere loss and gradient are NaN: nothing waits for a device here
            wrong = target[(target != reduction.ignore_index) & ((target < 0) | (target >= classes))]
            if len(wrong):
                raise IndexError(
                    f"found label {int(wrong[0])}, expected one from 0 to {classes - 1}, or {reduction.ignore_index}"
                )
        loss = HeadLoss.apply(
            self.x, call.weight, call.bias, call.sliced, call.bias_values, target, reduction, call.losses
        )
        call.notes_of_loss = loss.grad_fn.metadata
        return loss

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd, which has noted what it has to know.
        keywords = kwargs or {}
        logits = next(leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, SlicedLogits))
        is_view = any(each.alias_info is not None for each in (*func._schema.arguments, *func._schema.returns))
        same_view = func is torch.ops.aten.view.default and tuple(args[1]) == tuple(logits.shape)
        if is_view and not same_view and func not in _THE_SAME:
            raise RuntimeError(held(logits.call.sliced.name))
        args, keywords = tree_map_only(SlicedLogits, SlicedLogits.numbers, (args, keywords))
        return func(*args, **keywords)

    def __repr__(self, **_: Any) -> str:
        return f"SlicedLogits({self.call.sliced.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


class UsedLogits(torch.Tensor):
    """Logits that were computed after a loss of them, and so are no part of its graph."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (func is torch.Tensor.register_hook and _is_of_fsdp2(args[1])):
            _refuse_gradients(func)
        if any(not issubclass(UsedLogits, each) for each in types):
            return NotImplemented  # others have to do something of their own with their tensors
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.__reduce_ex__:  # readable without this package
                args = args[0].as_subclass(torch.Tensor), *args[1:]
            return func(*args, **(kwargs or {}))


_THE_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def head(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As ``torch.nn.functional.linear`` with a weight in slices; its result may wait for what needs it."""
    sliced = with_slices(weight, input, bias)
    waits = sliced is not None and sliced.waiting is not None and torch.is_grad_enabled() and not is_checkpointed()
    # Without a gradient there is no loss of them either.
    if not waits or not any(each is not None and each.requires_grad for each in (input, weight, bias)):
        return linear(input, weight, bias)
    x, dtype = for_computing(input, sliced)
    if x.dtype is not dtype:
        return linear(input, weight, bias)  # it says what is wrong
    call = HeadCall(x, weight, bias)
    sliced.waiting.append(call)
    note_use(weight, x, is_product=True)
    return _Head.apply(x, weight, bias, call)


def settle_logits(tree: Any) -> None:
    """Computes all logits in a tree, before something that is not ours takes them past Python."""
    for leaf in tree_leaves(tree):
        if type(leaf) is SlicedLogits and leaf.call.can_compute():
            leaf.call.compute()


def _is_of_fsdp2(hook: Any) -> bool:
    """Whether it tells FSDP2 that a backward begins, so that it has to be called if there is a gradient."""
    return isinstance(getattr(hook, "__self__", None), FSDPState)


def _refuse_gradients(func: Callable[..., Any]) -> None:
    if func in _OF_GRADIENTS:
        raise RuntimeError(
            f"found {func.__name__} of logits of a head in slices, after the model had computed its "
            "loss without them, expected no use of their gradient: the loss gives them none. Give the unit of the "
            'head "slices": 1 in the placement'
        )


class _Head(torch.autograd.Function):
    """Logits that wait: the result of x W^T + b. Shapes: x (..., columns), bias (classes,), result (..., classes)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: HeadCall
    ) -> SlicedLogits:
        ctx.sliced, ctx.dtype, ctx.version = call.sliced, x.dtype, call.sliced.version
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
    """Logits that wait: the result of an operator on others."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: SlicedLogits, change: WaitingChange) -> SlicedLogits:
        ctx.change, ctx.like = change, (tuple(logits.shape), logits.dtype, logits.device)
        with torch.enable_grad():  # the rows are what a loss gives its gradient to
            rows = change.of_rows(logits.x)
        return SlicedLogits(logits.call, rows, change.dtype, (logits, change))

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        shape, dtype, device = ctx.like
        with torch.enable_grad():
            before = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            after = ctx.change.of_values(before)
        return torch.autograd.grad(after, before, gradient)[0], None


class _Values(torch.autograd.Function):
    """The values of a call's logits, whose gradient is that of what waited."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: SlicedLogits, call: HeadCall) -> torch.Tensor:
        ctx.x, ctx.version_of_x, ctx.name = call.x, call.x._version, call.sliced.name
        return call.logits()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Autograd does not compare where hooks handle what it saves.
        if ctx.x._version != ctx.version_of_x:
            raise RuntimeError(
                f"found the input of the head of {ctx.name} changed in place after its logits were computed, expected "
                "it as it was: its gradient needs it. Change a copy"
            )
        return gradient, None
