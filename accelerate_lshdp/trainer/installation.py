# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""``install``: every Accelerator and Trainer of this process trains with LSHDP."""

from __future__ import annotations

import os

from accelerate_lshdp.accelerator.replacement import replace_accelerator
from accelerate_lshdp.documents.plan import PLAN_VARIABLE, Plan


def install(plan: Plan | str | os.PathLike[str] | None = None) -> None:
    """Lets every Accelerator and every Trainer that this process makes from now on train with LSHDP.

    May be called again, and before transformers is imported.

    Args:
        plan: for accelerators that are given none, also those of child processes; None: as the environment says.

    Raises:
        PlanError: the plan cannot be read.
    """
    # Not before: torch reads the environment when it is imported, and scripts set it in their first lines.
    from accelerate_lshdp.runtime.backend import join_launched_ranks, prepare_at_first_state, prepare_environment

    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        os.environ[PLAN_VARIABLE] = plan.to_json()
    if prepare_environment():
        join_launched_ranks()
    prepare_at_first_state()
    replace_accelerator()
