# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The accumulation that a Trainer's script asks for, in global batches, and that of a rank, in its micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import Trainer


@contextlib.contextmanager
def own_accumulation(trainer: Trainer) -> Iterator[None]:
    """Inside, the arguments' ``gradient_accumulation_steps`` is this rank's number of micro-batches in a step."""
    planned = trainer.accelerator.plan.micro_batches
    given = trainer._lshdp_script_steps = trainer.args.gradient_accumulation_steps
    if planned is not None:
        trainer.args.gradient_accumulation_steps *= planned[trainer.accelerator.process_index][1]
    try:
        yield
    finally:
        trainer.args.gradient_accumulation_steps = given
        del trainer._lshdp_script_steps


def script_steps(trainer: Trainer) -> int:
    """The script's own accumulation, in global batches, also inside of `own_accumulation`."""
    return getattr(trainer, "_lshdp_script_steps", trainer.args.gradient_accumulation_steps)


@contextlib.contextmanager
def accumulation_of_script(trainer: Trainer) -> Iterator[None]:
    """Inside, the accelerator accumulates as the script says, and not in a loop of the script's own afterwards."""
    accelerator = trainer.accelerator
    before, accelerator.gradient_accumulation_steps = accelerator.gradient_accumulation_steps, script_steps(trainer)
    try:
        yield
    finally:
        accelerator.gradient_accumulation_steps = before
