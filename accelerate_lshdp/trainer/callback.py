# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`LSHDPCallback`: one line in an existing script."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.engine.prepared import PreparedModel
from accelerate_lshdp.runtime.backend import prepare_at_first_state
from accelerate_lshdp.trainer.installation import install


prepare_at_first_state()  # the one that TrainingArguments make


class LSHDPCallback(TrainerCallback):
    """Makes every Trainer that is created after it train with LSHDP: ``Trainer(..., callbacks=[LSHDPCallback()])``.

    Its constructor does it: by the time a callback is called, the Trainer has its accelerator.

    Args:
        plan: a plan or the path of one; None: from ``ACCELERATE_LSHDP_PLAN``, or equal batches if that is not set.

    Raises:
        PlanError: the plan cannot be read.
        RuntimeError: from ``train``, if the Trainer was created before.
        ValueError: from ``train``, if the Trainer's accelerator has another plan.
    """

    def __init__(self, plan: Plan | str | os.PathLike[str] | None = None) -> None:
        self.plan = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
        install(self.plan)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **kwargs: Any
    ) -> None:
        if PreparedModel.of(model) is None:
            raise RuntimeError(
                "LSHDPCallback was created after the Trainer, which already had its accelerator: it comes too late. "
                "Create it before, as in Trainer(..., callbacks=[LSHDPCallback(plan=...)]), not by add_callback on a "
                "Trainer that exists; or use accelerate_lshdp.LSHDPTrainer(..., plan=...)"
            )
