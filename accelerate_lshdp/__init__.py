# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Locally sharded heterogeneous data parallel training for Hugging Face Accelerate.

The public names are imported on first use, so that planning and plan files work without loading torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from accelerate_lshdp.accelerator.creation import when_created


__version__ = "0.1.0.dev0"

_MODULE_OF = {
    "LSDPPlugin": "accelerate_lshdp.accelerator.plugin",
    "LSHDPAccelerator": "accelerate_lshdp.accelerator.accelerator",
    "LSHDPCallback": "accelerate_lshdp.trainer.callback",
    "LSHDPTrainer": "accelerate_lshdp.trainer.mixin",
    "LSHDPTrainerMixin": "accelerate_lshdp.trainer.mixin",
    "Plan": "accelerate_lshdp.documents.plan",
    "PlanError": "accelerate_lshdp.documents.plan",
    "Strategy": "accelerate_lshdp.documents.plan",
}
__all__ = [
    "LSDPPlugin",
    "LSHDPAccelerator",
    "LSHDPCallback",
    "LSHDPTrainer",
    "LSHDPTrainerMixin",
    "Plan",
    "PlanError",
    "Strategy",
]

if TYPE_CHECKING:
    from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator
    from accelerate_lshdp.accelerator.plugin import LSDPPlugin
    from accelerate_lshdp.documents.plan import Plan, PlanError, Strategy
    from accelerate_lshdp.trainer.callback import LSHDPCallback
    from accelerate_lshdp.trainer.mixin import LSHDPTrainer, LSHDPTrainerMixin


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def _hook_trainer() -> None:
    # Here, where all layers meet: the accelerator knows nothing of the Trainer that is built on it.
    if "transformers.trainer" in sys.modules:
        importlib.import_module("accelerate_lshdp.trainer.hook").hook_loaded_trainer()


when_created(_hook_trainer)
