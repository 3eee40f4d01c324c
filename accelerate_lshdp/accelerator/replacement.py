# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``accelerate.Accelerator`` stands for `LSHDPAccelerator` in a process: for scripts that are not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from accelerate import Accelerator


def replace_accelerator() -> None:
    """Makes ``accelerate.Accelerator(...)`` return an `LSHDPAccelerator`, by whatever name the class was imported.

    Creating an object of another subclass raises TypeError: it would train without the plan.
    """
    from accelerate import Accelerator

    def create(cls: type[Accelerator], *args: Any, **kwargs: Any) -> Accelerator:
        # Not before: that module may be what imports accelerate just now.
        from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator

        if cls is Accelerator:
            made = object.__new__(LSHDPAccelerator)  # type.__call__ then runs its __init__ with the same arguments
            made.stands_for_accelerator = True
            return made
        if not issubclass(cls, LSHDPAccelerator):
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__} is a subclass of accelerate.Accelerator, which cannot be "
                "replaced: it would train without the plan. Derive it from accelerate_lshdp.LSHDPAccelerator, create "
                "accelerate.Accelerator itself, or run the script without LSHDP"
            )
        return object.__new__(cls)

    Accelerator.__new__ = staticmethod(create)
