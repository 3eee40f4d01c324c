# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Parameters, gradients and optimizer states that wait, when somebody reads them, for a step that is being made.

A script holds these objects: it averages parameters, logs norms, sets gradients to zero. While a late step is under
way they get another class, in place, whose operators wait for its end first. (torch changes the class of a parameter
likewise, where lazy modules get theirs.) What says nothing of values, such as shapes, does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


_READ = (
    "_backward_hooks _post_accumulate_grad_hooks device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_sparse "
    "itemsize layout nbytes ndim output_nr requires_grad retains_grad shape"
).split()
_SET = ("grad", "requires_grad")
_CALLED = (
    "dim element_size get_device is_complex is_contiguous is_floating_point nelement numel register_hook "
    "register_post_accumulate_grad_hook requires_grad_ size stride"
).split()
#: What may be asked and set while the values are still to come.
_HARMLESS = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _READ),
        *(getattr(torch.Tensor, name).__set__ for name in _SET),
        *(getattr(torch.Tensor, name) for name in _CALLED),
        *(getattr(torch, name) for name in ("is_complex", "is_floating_point", "numel")),
    ]
)


class _Waiting:
    """What both classes of tensors do; ``_lshdp_settle`` of each tensor waits, and gives it its own class again."""

    __slots__ = ()  # as classes can only be exchanged that lay out their objects alike
    _harmless = _HARMLESS

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in cls._harmless:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            _settle(value)
        return function(*args, **kwargs)  # other classes among the arguments have their say

    # Those of parameters do not ask `__torch_function__`; and a copy must not be one that waits.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _settle(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: int) -> Any:
        _settle(self)
        return self.__reduce_ex__(protocol)


def _settle(value: Any) -> None:
    """Waits for the step of a tensor that waits for one."""
    # Another thread of the script may settle it at the same time.
    settle = vars(value).get("_lshdp_settle") if isinstance(value, _Waiting) else None
    if settle is not None:
        settle()


class WaitingParameter(_Waiting, nn.Parameter):
    """A parameter that is being stepped."""


class WaitingTensor(_Waiting, torch.Tensor):
    """A gradient that a step still reads, or a part of an optimizer's state that it changes."""


class PartOfGradient(_Waiting, torch.Tensor):
    """The place of a gradient that is not there yet; who asks where it is, or how often it was changed, may know."""

    _harmless = _HARMLESS | {torch.Tensor.data_ptr, torch.Tensor._version.__get__}


_CLASSES = {nn.Parameter: WaitingParameter, torch.Tensor: WaitingTensor}


def let_wait(tensors: Sequence[torch.Tensor], settle: Callable[[], None]) -> None:
    """Lets tensors wait until `let_go`; ``settle`` is to wait, and to call that."""
    for tensor in tensors:
        tensor._lshdp_settle = settle
        tensor.__class__ = _CLASSES[type(tensor)]


def part_of_gradient(place: torch.Tensor, settle: Callable[[], None]) -> PartOfGradient:
    """What a parameter has in ``.grad`` while parts of its gradient are elsewhere.

    Args:
        place: of the gradient, when it is there.
        settle: called by who needs values: brings them there and calls `let_go`, or raises an error.
    """
    part = place.detach()
    part._lshdp_settle = settle
    part.__class__ = PartOfGradient
    return part


def let_go(tensors: Sequence[torch.Tensor]) -> None:
    """Gives tensors their own classes again."""
    own = {waiting: cls for cls, waiting in _CLASSES.items()} | {PartOfGradient: torch.Tensor}
    for tensor in tensors:
        if isinstance(tensor, _Waiting):
            tensor.__class__ = own[type(tensor)]
            vars(tensor).pop("_lshdp_settle", None)


class WaitingState(MutableMapping):
    """The ``state`` of an optimizer, whose reader waits until all steps are made that change it.

    Attributes:
        own: the state itself.
    """

    def __init__(self, own: MutableMapping) -> None:
        self.own = own
        self._settles: list[Callable[[], None]] = []

    @staticmethod
    def put_before(optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> WaitingState:
        """Lets who reads an optimizer's state wait, until `let_go`.

        Args:
            optimizer: has the returned object in the place of its state from now on.
            settle: waits for a step, and calls `let_go`.
        """
        state = optimizer.state
        if not isinstance(state, WaitingState):
            state = optimizer.state = WaitingState(state)
        state._settles.append(settle)  # several models may be stepped by one optimizer
        return state

    @staticmethod
    def behind(optimizer: torch.optim.Optimizer) -> MutableMapping:
        """The optimizer's state itself, without waiting."""
        return optimizer.state.own if isinstance(optimizer.state, WaitingState) else optimizer.state

    @staticmethod
    def let_go(optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> None:
        """Takes note that a step is made; after the last one, the optimizer gets its state again."""
        state = optimizer.state
        if isinstance(state, WaitingState):  # else the script has loaded another one meanwhile
            state._settles = [other for other in state._settles if other != settle]
            if not state._settles:
                optimizer.state = state.own

    def _settled(self) -> Any:
        for settle in list(self._settles):
            settle()
        return self.own

    def __getitem__(self, key: Any) -> Any:
        return self._settled()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._settled()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._settled()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._settled())

    def __len__(self) -> int:
        return len(self._settled())

    # Those of the state itself, as reading an entry makes one where there is none

    def __contains__(self, key: Any) -> bool:
        return key in self._settled()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._settled().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._settled().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._settled().setdefault(key, default)

    def copy(self) -> Any:
        return self._settled().copy()

    def __reduce_ex__(self, protocol: int) -> Any:
        return self._settled().__reduce_ex__(protocol)
