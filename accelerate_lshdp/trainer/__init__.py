# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""transformers' Trainer with unequal batches: `LSHDPTrainer`, `LSHDPTrainerMixin`, `LSHDPCallback` and `install`.

`overrides` holds what a Trainer does differently if its accelerator is an `LSHDPAccelerator`, and `hook` how it comes
to do so; Trainers with another accelerator stay as they are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from accelerate_lshdp.trainer.callback import LSHDPCallback
    from accelerate_lshdp.trainer.installation import install
    from accelerate_lshdp.trainer.mixin import LSHDPTrainer, LSHDPTrainerMixin


__all__ = ["LSHDPCallback", "LSHDPTrainer", "LSHDPTrainerMixin", "install"]

# On first use: transformers takes seconds to import, and a script may never need it.
_MODULE_OF = {
    "LSHDPCallback": "accelerate_lshdp.trainer.callback",
    "LSHDPTrainer": "accelerate_lshdp.trainer.mixin",
    "LSHDPTrainerMixin": "accelerate_lshdp.trainer.mixin",
    "install": "accelerate_lshdp.trainer.installation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
