# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Any Trainer that gets an `LSHDPAccelerator` trains with `TrainerOverrides`: the one thing replaced in transformers.

The attribute ``accelerator`` of the class is replaced, because that is where every way to such a Trainer comes
together: `LSHDPTrainer`, the shim, `LSHDPCallback`, and scripts that set it themselves. The instance then changes its
class to one that has the overrides before the methods of its own, as FSDP2 does with modules.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary


if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

EXPECTED_TRANSFORMERS = "5.23"

_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def hook_loaded_trainer() -> None:
    """Replaces ``Trainer.accelerator`` if `transformers.Trainer` has been imported; may be called again.

    It is called whenever an `LSHDPAccelerator` is made. A Trainer makes its accelerator before it does anything else,
    and assigns it afterwards, so none is missed.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)  # None: not imported to its end
    if trainer is not None and not isinstance(vars(trainer).get("accelerator"), _AcceleratorAttribute):
        trainer.accelerator = _AcceleratorAttribute()


class _AcceleratorAttribute:
    """The attribute ``accelerator`` of a Trainer, whose kind decides which methods the Trainer has."""

    def __get__(self, trainer: Trainer | None, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        try:
            return vars(trainer)["accelerator"]
        except KeyError:
            raise AttributeError(f"this {type(trainer).__name__} has no accelerator yet") from None

    def __set__(self, trainer: Trainer, accelerator: Accelerator) -> None:
        from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator

        own_class = getattr(type(trainer), "_lshdp_own_class", type(trainer))
        is_ours = isinstance(accelerator, LSHDPAccelerator)
        trainer.__class__ = _with_overrides(own_class) if is_ours else own_class
        vars(trainer)["accelerator"] = accelerator

    def __delete__(self, trainer: Trainer) -> None:
        del vars(trainer)["accelerator"]


def _with_overrides(own_class: type[Trainer]) -> type[Trainer]:
    """A class of the same name whose methods are those of `TrainerOverrides` before those of a Trainer's class.

    Raises:
        RuntimeError: the installed transformers has another Trainer than the overrides are for.
    """
    if own_class not in _classes:
        from transformers import Trainer

        try:
            from accelerate_lshdp.trainer.overrides import TrainerOverrides
        except ImportError as error:
            raise _unknown_release(str(error)) from error
        overrides = [name for name, value in vars(TrainerOverrides).items() if inspect.isfunction(value)]
        missing = [name for name in overrides if not hasattr(Trainer, name)]
        if missing:
            raise _unknown_release(f"found no {', '.join(missing)}")
        names = ("__module__", "__qualname__", "__doc__")
        body = {name: getattr(own_class, name) for name in names} | {"_lshdp_own_class": own_class}
        _classes[own_class] = type(own_class)(own_class.__name__, (TrainerOverrides, own_class), body)
    return _classes[own_class]


def _unknown_release(found: str) -> RuntimeError:
    import transformers

    return RuntimeError(
        f"{found} in the Trainer of the installed transformers, expected it as in {EXPECTED_TRANSFORMERS}; install "
        f"that version (found {transformers.__version__}), or write the loop yourself: LSHDPAccelerator trains with "
        "this one too"
    )
