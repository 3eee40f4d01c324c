# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What becomes different in the process of an unmodified script, before it creates any state of accelerate."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Plan
from accelerate_lshdp.trainer.installation import install


if TYPE_CHECKING:
    from accelerate import PartialState


def change_accelerate() -> None:
    """Makes every ``Accelerator``, ``PartialState`` and ``Trainer`` of this process right."""
    install()
    if os.environ.get("ACCELERATE_USE_CPU") == "true":
        join_cpu_ranks()


def join_cpu_ranks() -> None:
    """Lets ``PartialState()`` be one of several CPU ranks; accelerate's would be alone, and stay so.

    Scripts may make it before the accelerator, for example for its ``main_process_first``.
    """
    from accelerate import PartialState

    initialise = PartialState.__init__

    @functools.wraps(initialise)
    def on_cpu(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        initialise(self, True, **kwargs)

    PartialState.__init__ = on_cpu


def use_plan(path: str) -> None:
    """Lets every accelerator of this process and its children read the plan at ``path``.

    Args:
        path: a plan file. The environment carries its absolute path, for scripts that change their directory.

    Raises:
        PlanError: if it cannot be read or is not a valid plan.
    """
    Plan.load(path)
    os.environ[PLAN_VARIABLE] = os.path.abspath(path)
