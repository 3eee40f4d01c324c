# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Any Trainer that gets an `LSHDPAccelerator` trains with `TrainerOverrides`: the one thing replaced in transformers.

The attribute ``accelerator`` of the class is replaced, because that is where every way to such a Trainer comes
together: `LSHDPTrainer`, the shim, `LSHDPCallback`, and scripts that set it themselves. The instance then changes its
class, as FSDP2 does with modules, to one that has the overrides between its own classes and `transformers.Trainer`.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary


if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

EXPECTED_TRANSFORMERS = "5.5 to 5.23"
#: Methods that older Trainers, from 5.5, do not call.
_NOT_IN_OLDER = ("_has_mixed_mesh_grads",)
_NONE = object()

# Weak on both sides: the new class has the other one as its base, and would keep it alive.
_classes: WeakKeyDictionary[type, weakref.ref[type]] = WeakKeyDictionary()


def hook_loaded_trainer() -> None:
    """Replaces ``Trainer.accelerator`` if `transformers.Trainer` has been imported; may be called again.

    It is called whenever an `LSHDPAccelerator` is made. A Trainer makes its accelerator before it does anything else,
    and assigns it afterwards, so none is missed.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)  # None: not imported to its end
    if trainer is None:
        return
    if not isinstance(vars(trainer).get("accelerator"), _AcceleratorAttribute):
        trainer.accelerator = _AcceleratorAttribute()
    # A class that has an attribute of this name itself (`accelerator = None`) would hide that of its base.
    classes = list(trainer.__subclasses__())
    while classes:
        derived = classes.pop()
        classes += derived.__subclasses__()
        own = vars(derived).get("accelerator", _NONE)
        if isinstance(own, property):
            raise RuntimeError(
                f"found a property accelerator in {derived.__module__}.{derived.__qualname__}, expected the attribute "
                "of transformers.Trainer, by which a Trainer comes to train with LSHDP; give the property another name"
            )
        if own is not _NONE and not isinstance(own, _AcceleratorAttribute):
            derived.accelerator = _AcceleratorAttribute(own)


class _AcceleratorAttribute:
    """The attribute ``accelerator`` of a Trainer, whose kind decides which methods the Trainer has.

    Args:
        default: what a Trainer has that was given none.
    """

    def __init__(self, default: Any = _NONE) -> None:
        self._default = default

    def __get__(self, trainer: Trainer | None, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        try:
            return vars(trainer)["accelerator"]
        except KeyError:
            if self._default is not _NONE:
                return self._default
            raise AttributeError(f"this {type(trainer).__name__} has no accelerator yet") from None

    def __set__(self, trainer: Trainer, accelerator: Accelerator) -> None:
        from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator

        # Of this very class: a script may derive another one from the class that a Trainer has changed to.
        own_class = vars(type(trainer)).get("_lshdp_own_class", type(trainer))
        is_ours = isinstance(accelerator, LSHDPAccelerator)
        trainer.__class__ = _with_overrides(own_class) if is_ours else own_class
        vars(trainer)["accelerator"] = accelerator

    def __delete__(self, trainer: Trainer) -> None:
        del vars(trainer)["accelerator"]


def _with_overrides(own_class: type[Trainer]) -> type[Trainer]:
    """A class of the same name that has the methods of `TrainerOverrides` in place of those of `transformers.Trainer`.

    Raises:
        RuntimeError: the installed transformers has another Trainer than the overrides are for.
    """
    made = _classes[own_class]() if own_class in _classes else None
    if made is None:
        overrides = _overrides()
        names = ("__module__", "__qualname__", "__doc__")
        body = {name: getattr(own_class, name) for name in names} | {"_lshdp_own_class": own_class}
        # Both derive from Trainer, so the order is: own classes, overrides, Trainer. What a script overrides itself
        # is called first, and its super() leads to the overrides.
        bases = (own_class, overrides) if own_class is not overrides.__base__ else (overrides,)
        made = type(own_class)(own_class.__name__, bases, body)
        _classes[own_class] = weakref.ref(made)
    return made


def _overrides() -> type[Trainer]:
    from transformers import trainer

    try:
        from accelerate_lshdp.trainer.overrides import TrainerOverrides
    except ImportError as error:
        raise _unknown_release(str(error)) from error
    names = [name for name, value in vars(TrainerOverrides).items() if inspect.isfunction(value)]
    names = [name for name in names if name not in ("_lshdp_drives", *_NOT_IN_OLDER)]
    missing = [name for name in names if not hasattr(trainer.Trainer, name)]
    missing += [name for name in ("skip_first_batches",) if not hasattr(trainer, name)]
    if missing:
        raise _unknown_release(f"found no {', '.join(missing)}")
    return TrainerOverrides


def _unknown_release(found: str) -> RuntimeError:
    import transformers

    return RuntimeError(
        f"{found} in the Trainer of the installed transformers, expected it as in {EXPECTED_TRANSFORMERS}; install "
        f"one of these versions (found {transformers.__version__}), or write the loop yourself: LSHDPAccelerator "
        "trains with this one too"
    )
