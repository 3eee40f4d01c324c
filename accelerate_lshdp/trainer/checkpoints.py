# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of a Trainer: beside its own files each holds the accelerator's state, which any plan can continue.

``checkpoint-N`` has what a plain Trainer writes for others to read (``model.safetensors``, ``config.json``, the
processor), on the main process, and on every node what training goes on from: ``trainer_state.json`` and a folder
``lshdp`` with model, optimizer, scheduler, position in the data and random generators.

As in `corrections`, each function replaces the Trainer's method of its name and gets that as its first argument.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints

from accelerate_lshdp.checkpoint.run_state import LoadedCheckpoint
from accelerate_lshdp.data import prepare
from accelerate_lshdp.data.loader import HeterogeneousDataLoader
from accelerate_lshdp.documents.plan import Plan
from accelerate_lshdp.runtime.object_exchange import all_objects
from accelerate_lshdp.trainer.accumulation import accumulation_of_script


logger = get_logger(__name__)

STATE_FOLDER = "lshdp"


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


def _save_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, output_dir: str) -> None:
    # Also after the training: by its steps a run that resumes counts the samples of one.
    with _scheduler_registered(self), accumulation_of_script(self):
        self.accelerator.save_state(os.path.join(output_dir, STATE_FOLDER))


def _save_rng_state(original: Callable[..., Any], self: Trainer, output_dir: str) -> None:
    """Nothing: the accelerator's state has it."""


def _save_checkpoint(original: Callable[..., Any], self: Trainer, model: Any, trial: Any) -> None:
    """Makes the checkpoint complete on nodes whose folder is their own, and removes old ones there."""
    original(model, trial)
    run_dir = self._get_output_dir(trial=trial)
    checkpoint = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
    if not self.args.save_only_model:
        _give_trainer_state_to_all(self, checkpoint)
    agree_on_best_checkpoint(self, run_dir)
    if self.accelerator.is_local_main_process and not self.args.should_save:
        rotate_checkpoints(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
    self.accelerator.wait_for_everyone()


def _give_trainer_state_to_all(self: Trainer, checkpoint: str) -> None:
    path = Path(checkpoint, TRAINER_STATE_NAME)
    known = [text for text in all_objects(path.read_text() if path.is_file() else None) if text is not None]
    if known and self.accelerator.is_local_main_process and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(known[0])
    self.accelerator.wait_for_everyone()


def agree_on_best_checkpoint(self: Trainer, run_dir: str) -> None:
    """Sets its path on this node, on all ranks or on none: all of them load it together."""
    if not self.state.best_global_step:
        return
    name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
    # What the Trainer knows may be an older one: it looked before the folder of the newest was there on this node.
    places = [self.state.best_model_checkpoint or "", os.path.join(run_dir, name)]
    found = next((place for place in places if os.path.basename(place) == name and os.path.isdir(place)), None)
    self.state.best_model_checkpoint = found if all(all_objects(found is not None)) else None


def warn_of_lost_best_checkpoint(self: Trainer) -> None:
    state = self.state
    if self.args.load_best_model_at_end and state.best_global_step and state.best_model_checkpoint is None:
        logger.warning(
            f"the best checkpoint, of step {state.best_global_step}, is not on every node, so the model stays that of "
            "the last step. Leave save_only_model out: what it saves is on the main node alone"
        )


# Loading


def train(
    original: Callable[..., Any], self: Trainer, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Resumes all ranks from one checkpoint, the newest that any node has if the script leaves the choice."""
    if resume_from_checkpoint:
        resume_from_checkpoint = _checkpoint_of_all_nodes(self, resume_from_checkpoint)
    return original(resume_from_checkpoint, *args, **kwargs)


def _checkpoint_of_all_nodes(self: Trainer, wanted: str | os.PathLike[str] | bool) -> str | bool:
    if wanted is True:
        output = self.args.output_dir
        own = get_last_checkpoint(output) if os.path.isdir(output) else None
        names = [name for name in all_objects(own and os.path.basename(own)) if name]
        if not names:
            return True  # the Trainer says that there is none
        wanted = os.path.join(output, max(names, key=lambda name: int(name.rpartition("-")[2])))
    checkpoint = os.fspath(wanted)
    self._lshdp_resumes_state = any(all_objects(os.path.isdir(os.path.join(checkpoint, STATE_FOLDER))))
    if _resumes_state(self):
        _give_trainer_state_to_all(self, checkpoint)
    return checkpoint


def _resumes_state(self: Trainer) -> bool:
    return getattr(self, "_lshdp_resumes_state", False)


def _load_from_checkpoint(
    original: Callable[..., Any], self: Trainer, resume_from_checkpoint: str, model: Any = None
) -> None:
    """Leaves the model to the accelerator's state, if the checkpoint has one."""
    if not _resumes_state(self):
        original(resume_from_checkpoint, model)


def _load_optimizer_and_scheduler(original: Callable[..., Any], self: Trainer, checkpoint: str | None) -> None:
    if checkpoint is None:
        return
    if _resumes_state(self):
        with _scheduler_registered(self):
            loaded = self.accelerator.load_state(os.path.join(checkpoint, STATE_FOLDER))
        _refuse_other_total(self, checkpoint, loaded)
    elif self.accelerator.policies.is_sharded:
        raise ValueError(
            f"found no folder {STATE_FOLDER!r} in {checkpoint}, so it was not saved with LSHDP, and strategy "
            f"{self.accelerator.strategy} cannot take the whole state of an optimizer. Continue with strategy ddp, or "
            "train from its weights (from_pretrained)"
        )
    else:
        original(checkpoint)


def _refuse_other_total(self: Trainer, checkpoint: str, loaded: LoadedCheckpoint) -> None:
    """Samples in an optimizer step: the plan's, or those of equal batches, times the script's own accumulation."""
    saved = Plan.from_dict(loaded.extra["plan"]).total_batch_size
    if saved is None:
        state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        saved = state.train_batch_size * loaded.world_size
    saved *= loaded.extra["gradient_accumulation_steps"]
    now = self.get_total_train_batch_size(self.args)
    if saved != now:
        raise ValueError(
            f"the checkpoint was saved with global batches of {saved} samples (those of an optimizer step), this run "
            f"has {now}. The Trainer counts its epochs in steps, so it would go on at another place in the data: "
            "resume with a plan of the same total and as many accumulation steps, or train from the checkpoint's "
            "weights (from_pretrained)"
        )


def _load_rng_state(original: Callable[..., Any], self: Trainer, checkpoint: str | None) -> None:
    """Nothing after the accelerator's state, which had it."""
    if not _resumes_state(self):
        original(checkpoint)


def skip_first_batches(original: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """Replaces the function that the Trainer calls: goes on at the restored position, if there is one, in samples."""
    if not isinstance(dataloader, HeterogeneousDataLoader):
        return original(dataloader, num_batches)
    return prepare.skip_first_batches(dataloader, None if dataloader.has_restored_position else num_batches)


def _load_best_model(original: Callable[..., Any], self: Trainer) -> None:
    folder = os.path.join(self.state.best_model_checkpoint, STATE_FOLDER)
    if any(all_objects(os.path.isdir(folder))):
        logger.info(f"Loading best model from {folder} (score: {self.state.best_metric})")
        self.accelerator.load_models(folder)
    elif self.accelerator.policies.is_sharded:
        raise ValueError(
            f"found no folder {STATE_FOLDER!r} in the best checkpoint {self.state.best_model_checkpoint}, from which "
            f"strategy {self.accelerator.strategy} loads its shards. Leave save_only_model out"
        )
    else:
        original()


@contextlib.contextmanager
def _scheduler_registered(self: Trainer) -> Iterator[None]:
    """The Trainer's scheduler, which the accelerator does not know, is among what is saved and restored."""
    registered = self.accelerator._custom_objects
    registered.append(self.lr_scheduler)
    try:
        yield
    finally:
        registered.remove(self.lr_scheduler)


CORRECTIONS = (
    save_model,
    _save_optimizer_and_scheduler,
    _save_rng_state,
    _save_checkpoint,
    train,
    _load_from_checkpoint,
    _load_optimizer_and_scheduler,
    _load_rng_state,
    _load_best_model,
)
