# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""transformers' Trainer with unequal batches: `LSHDPTrainer`, `LSHDPTrainerMixin`, `LSHDPCallback` and `install`.

What can be right in the accelerator is right there, for scripts with loops of their own too. `corrections` holds what
the Trainer itself assumes of equal batches; it acts on Trainers whose accelerator is an `LSHDPAccelerator`, and on no
other.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Plan


if TYPE_CHECKING:
    from accelerate_lshdp.trainer.callback import LSHDPCallback
    from accelerate_lshdp.trainer.mixin import LSHDPTrainer, LSHDPTrainerMixin


__all__ = ["LSHDPCallback", "LSHDPTrainer", "LSHDPTrainerMixin", "correct_loaded_trainer", "install"]

# On first use: transformers takes seconds to import, and a script may never need it.
_MODULE_OF = {
    "LSHDPCallback": "accelerate_lshdp.trainer.callback",
    "LSHDPTrainer": "accelerate_lshdp.trainer.mixin",
    "LSHDPTrainerMixin": "accelerate_lshdp.trainer.mixin",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def install(plan: Plan | str | os.PathLike[str] | None = None) -> None:
    """Lets every Accelerator and every Trainer that this process makes from now on train with LSHDP.

    May be called again, and before transformers is imported.

    Args:
        plan: for accelerators that are given none, also those of child processes; None: as the environment says.

    Raises:
        PlanError: the plan cannot be read.
    """
    from accelerate_lshdp.accelerator.replacement import replace_accelerator
    from accelerate_lshdp.runtime.backend import join_launched_ranks, prepare_environment

    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        os.environ[PLAN_VARIABLE] = plan.to_json()
    if prepare_environment():
        join_launched_ranks()
    replace_accelerator()
    correct_loaded_trainer()


def correct_loaded_trainer() -> None:
    """Corrects the Trainer if it has been imported, once; called whenever an `LSHDPAccelerator` is made.

    A Trainer makes its accelerator before it does anything else, so none is missed. Where the installed transformers
    cannot be corrected, Trainers refuse our accelerator; scripts that have imported the class alone train on.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)  # None: not imported to its end
    if trainer is None or hasattr(trainer, "_corrected_for_lshdp"):
        return
    try:
        importlib.import_module("accelerate_lshdp.trainer.corrections").correct_trainer()
    except (AttributeError, ImportError) as error:
        from accelerate_lshdp.trainer.refusal import RefusedAccelerator

        trainer.accelerator = RefusedAccelerator(str(error))
        trainer._corrected_for_lshdp = False
    else:
        trainer._corrected_for_lshdp = True
