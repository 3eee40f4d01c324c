# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of a Trainer: beside its own files each holds the accelerator's state, which any plan can continue.

``checkpoint-N`` has what a plain Trainer writes for others to read (``model.safetensors``, ``config.json``, the
processor, ``trainer_state.json``) and a folder ``lshdp``, complete on every node, from which training goes on: model,
optimizer, scheduler, position in the data and random generators.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accelerate.logging import get_logger
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from accelerate_lshdp import data
from accelerate_lshdp.data_loader import HeterogeneousDataLoader


logger = get_logger(__name__)

STATE_FOLDER = "lshdp"


def _state_folder(checkpoint: str) -> str | None:
    folder = os.path.join(checkpoint, STATE_FOLDER)
    return folder if os.path.isdir(folder) else None


# Saving


def save_model(
    original: Callable[..., Any], self: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Gives the Trainer the whole model of a sharded strategy (collective)."""
    if not self.accelerator.policies.is_sharded:
        return original(output_dir, _internal_call)
    state = self.accelerator.get_state_dict(self.model)
    self._save(output_dir, state_dict=state)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def _save(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> None:
    """Saves the arguments as the script gave them."""
    now = self.args.gradient_accumulation_steps
    self.args.gradient_accumulation_steps = getattr(self, "_lshdp_script_steps", now)
    try:
        original(*args, **kwargs)
    finally:
        self.args.gradient_accumulation_steps = now


def _save_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, output_dir: str) -> None:
    with _scheduler_registered(self):
        self.accelerator.save_state(os.path.join(output_dir, STATE_FOLDER))


def _save_rng_state(original: Callable[..., Any], self: Trainer, output_dir: str) -> None:
    """Nothing: the accelerator's state has it."""


def _save_checkpoint(original: Callable[..., Any], self: Trainer, model: Any, trial: Any) -> None:
    """Also removes old checkpoints on nodes whose folder is their own."""
    original(model, trial)
    if self.accelerator.is_local_main_process and not self.args.should_save:
        rotate_checkpoints(
            self._get_output_dir(trial=trial),
            self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
        )
    self.accelerator.wait_for_everyone()


# Loading


def _load_from_checkpoint(
    original: Callable[..., Any], self: Trainer, resume_from_checkpoint: str, model: Any = None
) -> None:
    """Leaves the model to the accelerator's state, if the checkpoint has one."""
    if _state_folder(resume_from_checkpoint) is None:
        original(resume_from_checkpoint, model)


def _load_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, checkpoint: str | None) -> None:
    folder = None if checkpoint is None else _state_folder(checkpoint)
    if folder is not None:
        with _scheduler_registered(self):
            self.accelerator.load_state(folder)
    elif checkpoint is not None and self.accelerator.policies.is_sharded:
        raise ValueError(
            f"found no folder {STATE_FOLDER!r} in {checkpoint}, so it was not saved with LSHDP, and strategy "
            f"{self.accelerator.strategy} cannot take the whole state of an optimizer. Continue with strategy ddp, or "
            "train from its weights (from_pretrained)"
        )
    else:
        original(checkpoint)


def _load_rng_state(original: Callable[..., Any], self: Trainer, checkpoint: str | None) -> None:
    if checkpoint is not None and _state_folder(checkpoint) is None:
        original(checkpoint)


def skip_first_batches(original: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """Goes on at the restored position, in samples, if there is one; under another plan the batches are others."""
    if not isinstance(dataloader, HeterogeneousDataLoader):
        return original(dataloader, num_batches)
    return data.skip_first_batches(dataloader, None if dataloader.has_restored_position else num_batches)


class _scheduler_registered:
    """The Trainer's scheduler, which the accelerator does not know, is among what is saved and restored."""

    def __init__(self, trainer: Trainer) -> None:
        self._custom, self._scheduler = trainer.accelerator._custom_objects, trainer.lr_scheduler

    def __enter__(self) -> None:
        self._custom.append(self._scheduler)

    def __exit__(self, *_: object) -> None:
        self._custom.remove(self._scheduler)


CORRECTIONS = (
    save_model,
    _save,
    _save_optimizer_and_scheduler,
    _save_rng_state,
    _save_checkpoint,
    _load_from_checkpoint,
    _load_optimizer_and_scheduler,
    _load_rng_state,
)
