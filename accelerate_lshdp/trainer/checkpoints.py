# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of a Trainer: beside its own files each holds the accelerator's state, which any plan can continue.

``checkpoint-N`` has what a plain Trainer writes for others to read (``model.safetensors``, ``config.json``, the
processor), on the main process, and on every node what training goes on from: ``trainer_state.json`` and a folder
``lshdp`` with model, optimizer, scheduler, position in the data and random generators.

`overrides.TrainerOverrides` calls these functions where the Trainer saves and loads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import Trainer, TrainerState, trainer
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


def save_state(self: Trainer, output_dir: str) -> None:
    """Saves what training goes on from (collective).

    Also after the training: by its steps a run that resumes counts the samples of one.
    """
    with _scheduler_registered(self), accumulation_of_script(self):
        self.accelerator.save_state(os.path.join(output_dir, STATE_FOLDER))


def complete_on_all_nodes(self: Trainer, trial: Any) -> None:
    """Completes the newest checkpoint on nodes whose folder is their own, and removes old ones there (collective)."""
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


def checkpoint_of_all_nodes(self: Trainer, wanted: str | os.PathLike[str] | bool) -> str | bool:
    """The folder that all ranks resume from (collective): ``wanted``, or the newest that any node has if that is True.

    The Trainer's own state in it is given to nodes that lack it.
    """
    if wanted is True:
        output = self.args.output_dir
        own = get_last_checkpoint(output) if os.path.isdir(output) else None
        names = [name for name in all_objects(own and os.path.basename(own)) if name]
        if not names:
            return True  # the Trainer says that there is none
        wanted = os.path.join(output, max(names, key=lambda name: int(name.rpartition("-")[2])))
    checkpoint = os.fspath(wanted)
    self._lshdp_resumes_state = any(all_objects(os.path.isdir(os.path.join(checkpoint, STATE_FOLDER))))
    if resumes_state(self):
        _give_trainer_state_to_all(self, checkpoint)
    return checkpoint


def resumes_state(self: Trainer) -> bool:
    """Whether the checkpoint that this training resumes from has the accelerator's state."""
    return getattr(self, "_lshdp_resumes_state", False)


def load_state(self: Trainer, checkpoint: str) -> bool:
    """Goes on from the accelerator's state in a checkpoint (collective); False: it has none.

    Raises:
        ValueError: there is none, and the strategy cannot take what a plain Trainer has saved; or the checkpoint has
            global batches of another size.
    """
    if resumes_state(self):
        with _scheduler_registered(self):
            loaded = self.accelerator.load_state(os.path.join(checkpoint, STATE_FOLDER))
        _refuse_other_total(self, checkpoint, loaded)
        return True
    if self.accelerator.policies.is_sharded:
        raise ValueError(
            f"found no folder {STATE_FOLDER!r} in {checkpoint}, so it was not saved with LSHDP, and strategy "
            f"{self.accelerator.strategy} cannot take the whole state of an optimizer. Continue with strategy ddp, or "
            "train from its weights (from_pretrained)"
        )
    return False


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


@contextlib.contextmanager
def skipping_in_samples() -> Iterator[None]:
    """Inside, the Trainer goes on at a restored position of its loader, which is in samples, not in batches."""
    original = trainer.skip_first_batches

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if not isinstance(dataloader, HeterogeneousDataLoader):
            return original(dataloader, num_batches)
        return prepare.skip_first_batches(dataloader, None if dataloader.has_restored_position else num_batches)

    trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        trainer.skip_first_batches = original


def load_best_model(self: Trainer) -> bool:
    """Loads the best checkpoint's model from the accelerator's state (collective); False: it has none.

    Raises:
        ValueError: there is none, and the strategy needs it.
    """
    folder = os.path.join(self.state.best_model_checkpoint, STATE_FOLDER)
    if any(all_objects(os.path.isdir(folder))):
        logger.info(f"Loading best model from {folder} (score: {self.state.best_metric})")
        self.accelerator.load_models(folder)
        return True
    if self.accelerator.policies.is_sharded:
        raise ValueError(
            f"found no folder {STATE_FOLDER!r} in the best checkpoint {self.state.best_model_checkpoint}, from which "
            f"strategy {self.accelerator.strategy} loads its shards. Leave save_only_model out"
        )
    return False


@contextlib.contextmanager
def _scheduler_registered(self: Trainer) -> Iterator[None]:
    """The Trainer's scheduler, which the accelerator does not know, is among what is saved and restored."""
    registered = self.accelerator._custom_objects
    registered.append(self.lr_scheduler)
    try:
        yield
    finally:
        registered.remove(self.lr_scheduler)
