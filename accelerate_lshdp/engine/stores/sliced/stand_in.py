# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`SlicedTensor`: what stands in a module for a weight in slices while a forward or a backward runs.

It has a shape and a precision but no memory. The operators that can take a weight slice by slice do so, whatever
module calls them; any other use of it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from accelerate_lshdp.engine.stores.sliced.logits import head
from accelerate_lshdp.engine.stores.sliced.operators import addmm, embedding, matmul
from accelerate_lshdp.engine.stores.sliced.weight import SlicedWeight


def _no_memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    """An empty storage, for what counts the memory of all tensors of a process."""
    return torch.UntypedStorage(0)


_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: head,
    functional.embedding: embedding,
    torch.addmm: addmm,
    torch.mm: matmul,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.Tensor.untyped_storage: _no_memory,
}
#: What is known of a weight without its values.
_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "is_cuda",
    "is_cpu",
    "is_meta",
)
_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "requires_grad_")
KNOWN_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


class SlicedTensor(torch.Tensor):
    """A weight in slices, as autograd and the modules of a forward see it: a leaf of the graph.

    Args:
        sliced: the weight.
    """

    sliced: SlicedWeight

    @staticmethod
    def __new__(cls, sliced: SlicedWeight) -> SlicedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            sliced.shape,
            dtype=sliced.dtype,
            device=sliced.device,
            requires_grad=sliced.parameter.requires_grad,
        )

    def __init__(self, sliced: SlicedWeight) -> None:
        self.sliced = sliced
        self._is_param = True  # makes it an instance of nn.Parameter, as torch does with other classes of tensors

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func in KNOWN_WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        operator = _OPERATORS.get(func)
        result = NotImplemented if operator is None else operator(*args, **keywords)
        if result is NotImplemented:
            raise RuntimeError(_refusal(func, [*args, *keywords.values()]))
        return result

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(_refusal(func, [*args, *(kwargs or {}).values()]))

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """Calls a hook with each slice of the gradient, before it is summed over ranks: autograd itself sees none."""
        handle = RemovableHandle(self.sliced.hooks)
        self.sliced.hooks[handle.id] = hook
        return handle

    def __repr__(self, **_: Any) -> str:
        return f"SlicedTensor({self.sliced.name}, shape={tuple(self.sliced.shape)}, dtype={self.sliced.dtype})"


def _refusal(func: Callable[..., Any], arguments: list[Any]) -> str:
    names = ", ".join(each.sliced.name for each in arguments if isinstance(each, SlicedTensor)) or "a weight"
    called = getattr(func, "__name__", str(func))
    if called == "__get__":
        called = getattr(getattr(func, "__self__", None), "__name__", called)
    return (
        f"found {names}, which is in slices, in {called}, expected it in linear, embedding, matmul or addmm (without "
        'further options): the whole of it is never in memory. Give its unit "slices": 1 in the placement, or use the '
        "weight outside of the forward, where it is sharded"
    )
