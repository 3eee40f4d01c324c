# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What can be done with logits of a head in slices while their values are not computed.

Those are views and casts that leave the classes in the last dimension, and one cross entropy of all of their rows.
Everything else needs their values. Measurements of models ask the same functions, so that memory which is not planned
is not needed either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_lshdp.engine.stores.sliced.head_loss import Reduction


#: What is known of logits without their values.
KNOWN = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "element_size", "__len__")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex")),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
#: What is known of all of them: they are results that require a gradient. FSDP2 asks whether an output is a view.
CONSTANT: dict[Callable[..., Any], Any] = {
    torch.Tensor.requires_grad.__get__: True,
    torch.Tensor.is_leaf.__get__: False,
    torch.Tensor.grad.__get__: None,
    torch.Tensor._base.__get__: None,
}
#: What an operator does with a tensor.
Change = Callable[[torch.Tensor], torch.Tensor]
#: Set on the first of two hooks of saved tensors that only watches, and computes nothing again.
WATCHES_ONLY = "_lshdp_watches_only"
_SHAPING = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten}
_CASTING = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.to}


@dataclass(frozen=True, slots=True)
class WaitingChange:
    """An operator on logits whose result can wait for what needs its values.

    Attributes:
        of_values: what it does with the values.
        of_rows: what it does with the input of the head, whose rows are those of the logits.
        dtype: of its result.
        is_cast: whether it changes the precision alone.
        leaves_out: 1: the rows of the first or the last position, as where labels are shifted; 2: others; 0: no rows.
    """

    of_values: Change
    of_rows: Change
    dtype: torch.dtype
    is_cast: bool = False
    leaves_out: int = 0


def waiting_change(
    func: Callable[..., Any], logits: torch.Tensor, others: tuple, keywords: dict[str, Any]
) -> WaitingChange | None:
    """What an operator does with logits, if its result can wait.

    Args:
        func: given these:
        logits: nothing but their shape, precision and device is asked for.
        others: further arguments.
        keywords: of the call.
    """
    if func in _CASTING:
        return _cast(func, logits, others, keywords)
    if func in _SHAPING:
        return _shaped(func, logits, others, keywords)
    if func is torch.Tensor.__getitem__ and len(others) == 1 and not keywords:
        return _indexed(logits.ndim, logits.dtype, others[0])
    if func is torch.Tensor.contiguous and not others and not keywords:
        return WaitingChange(func, _as_it_is, logits.dtype)
    return None


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

    It can for a matrix of logits and integer labels, without class weights and label smoothing, outside of
    checkpointing.
    """
    integers = isinstance(target, torch.Tensor) and target.dtype is torch.long and target.device == input.device
    options = weight is not None or size_average is not None or reduce is not None or label_smoothing or others
    if not integers or options or input.ndim != 2 or target.shape != input.shape[:1]:
        return None
    if reduction not in ("mean", "sum", "none") or is_checkpointed() or not torch.is_grad_enabled():
        return None
    # Autocast computes this loss in fp32.
    is_autocast = torch.is_autocast_enabled(input.device.type)
    dtype = torch.promote_types(input.dtype, torch.float32) if is_autocast else input.dtype
    return Reduction(ignore_index, reduction, dtype)


def is_checkpointed() -> bool:
    """Whether somebody handles what autograd saves, as checkpointing does, which computes again what it was."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not getattr(top[0], WATCHES_ONLY, False)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _cast(
    func: Callable[..., Any], logits: torch.Tensor, others: tuple, keywords: dict[str, Any]
) -> WaitingChange | None:
    if any(not isinstance(each, torch.dtype | torch.device | str) for each in (*others, *keywords.values())):
        return None
    like = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *others, **keywords)
    # A loss is computed in the higher precision at once, so no digits may be lost on the way to it.
    gains = torch.promote_types(like.dtype, logits.dtype) is like.dtype
    if like.device != logits.device or not gains:
        return None
    return WaitingChange(lambda tensor: func(tensor, *others, **keywords), _as_it_is, like.dtype, is_cast=True)


def _shaped(
    func: Callable[..., Any], logits: torch.Tensor, others: tuple, keywords: dict[str, Any]
) -> WaitingChange | None:
    like = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *others, **keywords)
    if like.dtype is not logits.dtype or not like.ndim or like.shape[-1] != logits.shape[-1]:
        return None
    # The classes are the last dimension before and after, so the rows stay in their order.
    return WaitingChange(
        lambda tensor: func(tensor, *others, **keywords),
        lambda x: x.reshape(*like.shape[:-1], x.shape[-1]),
        logits.dtype,
    )


def _indexed(dimensions: int, dtype: torch.dtype, index: Any) -> WaitingChange | None:
    entries = index if isinstance(index, tuple) else (index,)
    if not entries or not all(entry is Ellipsis or type(entry) in (int, slice) for entry in entries):
        return None
    dots = sum(entry is Ellipsis for entry in entries)
    others = len(entries) - dots
    # The classes are reached by the last entry: after dots, or if there are as many entries as dimensions.
    reaches_classes = others == dimensions or (dots and entries[-1] is not Ellipsis)
    if dots > 1 or (reaches_classes and (entries[-1] is Ellipsis or entries[-1] != slice(None))):
        return None
    leaves_out = _left_out(dimensions, entries)
    return WaitingChange(lambda tensor: tensor[index], lambda x: x[index], dtype, leaves_out=leaves_out)


def _left_out(dimensions: int, entries: tuple) -> int:
    place = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    missing = dimensions - len(entries) + (Ellipsis in entries)
    whole = [*entries[:place], *[slice(None)] * missing, *entries[place + 1 :]]
    positions = whole.pop(-2) if dimensions > 2 else slice(None)
    if any(entry != slice(None) for entry in whole) or positions not in (slice(None), slice(None, -1), slice(1, None)):
        return 2
    return int(positions != slice(None))
