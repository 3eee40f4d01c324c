# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the Trainer of an unknown release of transformers says as soon as it gets an accelerator of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers


if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

EXPECTED_TRANSFORMERS = "5.23"


class RefusedAccelerator:
    """The attribute ``accelerator`` of a class of Trainers that train with any but an `LSHDPAccelerator`.

    An attribute, because the accelerator is made in the middle of a method that cannot be replaced while it runs.

    Args:
        reason: what was found in the installed transformers.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __get__(self, trainer: Trainer | None, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        try:
            return vars(trainer)["accelerator"]
        except KeyError:
            raise AttributeError(f"this {type(trainer).__name__} has no accelerator yet") from None

    def __set__(self, trainer: Trainer, accelerator: Accelerator) -> None:
        from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator

        if isinstance(accelerator, LSHDPAccelerator):
            raise RuntimeError(
                f"{self._reason} in the Trainer of the installed transformers, expected it as in "
                f"{EXPECTED_TRANSFORMERS}; install that version (found {transformers.__version__}), or write the loop "
                "yourself: LSHDPAccelerator trains with this one too"
            )
        vars(trainer)["accelerator"] = accelerator

    def __delete__(self, trainer: Trainer) -> None:
        del vars(trainer)["accelerator"]
