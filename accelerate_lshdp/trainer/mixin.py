# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`LSHDPTrainer`, and the mixin that makes any other Trainer one."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from transformers import Trainer, trainer

from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.runtime.backend import join_launched_ranks, prepare_at_first_state, prepare_environment


if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

prepare_at_first_state()  # the one that TrainingArguments make


class LSHDPTrainerMixin(_Base):
    """Trains with LSHDP: ``class MyTrainer(LSHDPTrainerMixin, Seq2SeqTrainer): ...``.

    It gives the Trainer its `LSHDPAccelerator`, with which any Trainer gets `overrides.TrainerOverrides`.

    Args:
        plan: a plan or the path of one; None: from ``ACCELERATE_LSHDP_PLAN``, or equal batches if that is not set.
        *args, **kwargs: as for the other Trainer.

    Raises:
        RuntimeError: on all ranks, if the plan is wrong on any of them or differs between them.
        ValueError: from ``train``, if the arguments contradict the plan or cannot be exact.
    """

    _lshdp_plan: Plan | str | os.PathLike[str] | None = None

    def __init__(self, *args: Any, plan: Plan | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        self._lshdp_plan = plan
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        if prepare_environment():
            join_launched_ranks()
        stock = trainer.Accelerator
        trainer.Accelerator = functools.partial(LSHDPAccelerator, plan=self._lshdp_plan)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            trainer.Accelerator = stock


class LSHDPTrainer(LSHDPTrainerMixin, Trainer):
    """``transformers.Trainer`` with LSHDP; takes the keyword ``plan``, see `LSHDPTrainerMixin`."""
