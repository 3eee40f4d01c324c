# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Attributes and hooks of a user's module while it is prepared, which its pickles and copies leave out.

``torch.save``, ``pickle`` and ``copy.deepcopy`` of a prepared module give the user's module, as if it had never been
prepared: no hook of this package, nothing that holds process groups, and nothing that needs the package to be read.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from accelerate_lshdp.engine.attachments import Attachments


#: The attribute of a module that leads to its ``PreparedModel``.
PREPARED = "_lshdp_prepared"

#: The attribute of a module with those of its attributes that were changed, by name as they were.
_CHANGED = "_lshdp_changed"
_ATTRIBUTES = (PREPARED, _CHANGED, "no_sync", "_apply", "__reduce_ex__")


class _Missing:
    """What an attribute was that the module's class alone had. The class stands for itself: copies of it are it."""


class Preparation(Protocol):
    """The calls of ``PreparedModel`` that a module's own methods need."""

    def skips_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool: ...

    def refuse_copy(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...


class Link:
    """A reference from a module to its ``PreparedModel``, which it keeps alive; a copy of it is empty."""

    def __init__(self, prepared: Preparation | None = None) -> None:
        self.prepared = prepared

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        return Link()

    def __reduce__(self) -> tuple:
        return Link, ()


class NoSync:
    """``model.no_sync`` of a prepared model, as in torch's DDP: forwards inside do not synchronise their backward.

    A deep or pickled copy of the model is not prepared; its ``no_sync`` does nothing, and needs no class of ours.
    """

    def __init__(self, prepared: Preparation) -> None:
        self._prepared = weakref.ref(prepared)  # the model holds this, and must not hold itself

    def __call__(self) -> AbstractContextManager[None]:
        prepared = self._prepared()
        return contextlib.nullcontext() if prepared is None else prepared.no_sync()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (contextlib.nullcontext,)


class _Method:
    """A method of one module; copied by a ``__deepcopy__`` of the module's own class, it is a method of the copy."""

    def __init__(self, module: nn.Module | None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Method:
        # `memo` leads from the id of what was copied to its copy; a bound method would go on leading to the original.
        module = None if self._reference is None else self._reference()
        return type(self)(memo.get(id(module)))

    @property
    def module(self) -> nn.Module:
        module = None if self._reference is None else self._reference()
        if module is None:
            raise RuntimeError(
                "found a copy of a prepared module that a __deepcopy__ of its own class made with the attributes of "
                "that module, which it cannot be told from. Write memo[id(self)] = copy in __deepcopy__ before it "
                "copies them with memo, or leave __deepcopy__ to nn.Module"
            )
        return module

    @property
    def prepared(self) -> Preparation | None:
        link = getattr(self.module, PREPARED, None)
        return None if link is None else link.prepared


class _Conversion(_Method):
    """``_apply`` of a prepared module, which ``.to()``, ``.cpu()``, ``.float()`` and their like call."""

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        module, prepared = self.module, self.prepared
        # torch's _apply replaces parameters even by an equal copy, which would lead them out of buckets, shared memory
        # and shards.
        if prepared is not None and prepared.skips_conversion(convert):
            return module
        return type(module)._apply(module, convert, *args, **kwargs)


class _Reduction(_Method):
    """``__reduce_ex__`` of a prepared module, which ``pickle`` and ``copy`` look up in the object."""

    def __call__(self, protocol: int) -> tuple:
        module, prepared = self.module, self.prepared
        if prepared is not None:
            prepared.refuse_copy()
        # By the class: the instance's attribute is this object.
        reduced = type(module).__reduce_ex__(module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        return *reduced[:2], _without_marks(reduced[2]), *reduced[3:]


def mark(module: nn.Module, link: Link) -> None:
    """Attaches a link to what was prepared, and the methods that go by it; the state dict stays as it is."""
    # Not by setattr: modules may have one of their own.
    vars(module).update({PREPARED: link, "no_sync": NoSync(link.prepared), "_apply": _Conversion(module)})
    exclude_hooks_from_pickles(module)


def unmark(module: nn.Module) -> None:
    """Removes from a module what `mark` attached, and from its parts what `exclude_hooks_from_pickles` did."""
    for part in module.modules():
        for name in _ATTRIBUTES:
            vars(part).pop(name, None)


def parameters_of(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """The parameters of a module by torch's own method, also where a script's class has a ``parameters`` of its own.

    Such methods name what an optimizer is to have, and may take no arguments.
    """
    return nn.Module.parameters(module, recurse)


def exclude_hooks_from_pickles(module: nn.Module) -> None:
    """Keeps hooks of this package out of a module's pickles and copies."""
    vars(module)["__reduce_ex__"] = _Reduction(module)


def change(module: nn.Module, name: str, value: Any, attachments: Attachments) -> None:
    """Sets an attribute of a module, which has the one from before when the attachments are removed.

    So have its pickles and copies, if `exclude_hooks_from_pickles` was called.
    """
    own = vars(module)
    own.setdefault(_CHANGED, {})[name] = own.get(name, _Missing)
    attachments.at_removal(functools.partial(_change_back, own, name))
    own[name] = value


def _change_back(own: dict[str, Any], name: str) -> None:
    _restore(own, {name: own[_CHANGED].pop(name)})


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _Missing:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _without_marks(state: Any) -> Any:
    """A module's state for a pickle, without what this package attached to it."""
    if not isinstance(state, dict):
        return state
    kept = {name: value for name, value in state.items() if name not in _ATTRIBUTES}
    _restore(kept, state.get(_CHANGED, {}))
    hooks = {name: value for name, value in kept.items() if "_hooks" in name and isinstance(value, dict)}
    # Numbers of hooks, which no other hook of this process has. What torch keeps of a hook beside it (that it takes
    # keywords, say) has its number, too, and would be that of another hook in the process that reads the pickle.
    ours = {key for of_kind in hooks.values() for key, hook in of_kind.items() if _is_ours(hook)}
    for name, of_kind in hooks.items():
        kept[name] = type(of_kind)((key, hook) for key, hook in of_kind.items() if key not in ours)
    return kept


def _is_ours(hook: Any) -> bool:
    module = getattr(getattr(hook, "hook", hook), "__module__", None)  # torch wraps some
    return isinstance(module, str) and module.partition(".")[0] == __name__.partition(".")[0]


def is_noop_conversion(
    convert: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, device: torch.device
) -> bool:
    """Whether a conversion leaves a module's parameters and buffers as and where they are.

    Args:
        convert: from a tensor as it is to what it shall be.
        module: its parameters may be elsewhere than on ``device``, if they come there to be computed with.
        device: where its forward runs.
    """
    for place, dtype in {(t.device, t.dtype) for t in (*parameters_of(module), *module.buffers())}:
        # Four dimensions, so that a change of the memory format shows.
        probe = torch.empty(1, 2, 2, 2, dtype=dtype, device=place)
        result = convert(probe)
        same_device = with_index(result.device) in (with_index(place), with_index(device))
        if not (same_device and result.dtype == dtype and result.stride() == probe.stride()):
            return False
        if place.type == "cpu" and result.is_shared():  # share_memory()
            return all(t.is_shared() for t in (*parameters_of(module), *module.buffers()) if t.device.type == "cpu")
    return True


def with_index(device: torch.device) -> torch.device:
    """The device by its number; without one, the current device is meant. The CPU has none."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None or not torch.accelerator.is_available():
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
