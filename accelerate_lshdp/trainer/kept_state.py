# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Trainer in an elastic run: its own part of the state that ranks keep, and how it goes on from there."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from accelerate_lshdp.accelerator.run_checkpoints import layout_of
from accelerate_lshdp.accelerator.state_keeper import EXTRA_STATE, state_keeper
from accelerate_lshdp.checkpoint.manifest import MANIFEST
from accelerate_lshdp.runtime.object_exchange import all_objects
from accelerate_lshdp.trainer import checkpoints
from accelerate_lshdp.trainer.accumulation import script_steps


logger = get_logger(__name__)


class _Losses(TrainerCallback):
    """Gives a training the sums of losses of the ranks before.

    Args:
        trainer: that trains.
        sums: as `_own_part` has noted them.
    """

    def __init__(self, trainer: Trainer, sums: dict[str, Any]) -> None:
        self._trainer = trainer
        self._sums = sums

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._total_loss_scalar = self._sums["total_loss"]
        self._trainer._initial_global_step = self._sums["initial_step"]


def to_continue_from(self: Trainer) -> str | None:
    """The folder from which a training goes on whose ranks were started again (collective); None: it begins.

    Raises:
        RuntimeError: on all ranks, if a later training of the script was the one that was interrupted.
    """
    keeper = state_keeper()
    self._lshdp_kept: dict[str, Any] | None = None
    if keeper is None or keeper.is_loaded or not keeper.continues_run:
        return None
    found = keeper.bring(layout_of(self.accelerator.session))
    if found is None:
        last = _last_checkpoint(self, keeper.since)
        keeper.is_loaded = last is None
        return last
    own = json.loads(json.loads((found / "training.json").read_bytes())["extra"][EXTRA_STATE])
    if own["training"] != keeper.trainings + 1:
        raise RuntimeError(
            f"found the state of training {own['training']} of this script, expected that of training"
            f" {keeper.trainings + 1}, which begins now: an elastic run starts the script again when nodes come or go,"
            " and its trainings before that one cannot be left out. Let the script train once, and start it for each"
            " training"
        )
    self._lshdp_kept = own
    if self.accelerator.is_local_main_process:
        (found.parent / TRAINER_STATE_NAME).write_text(json.dumps(own["state"]))
    self.accelerator.wait_for_everyone()
    return str(found.parent)


def _last_checkpoint(self: Trainer, since: float) -> str | None:
    """The newest checkpoint of this run that any node has; nobody has kept anything newer."""
    output = self.args.output_dir
    # Those that were completed, and are not of another run.
    complete = [
        path.parent.name
        for path in Path(output).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
        if path.stat().st_mtime >= since and (path.parent / checkpoints.STATE_FOLDER / MANIFEST).exists()
    ]
    names = [name for found in all_objects(complete) for name in found]
    if not names:
        logger.warning(f"no node has kept the state of the run or has a checkpoint in {output}: it begins again")
        return None
    name = max(names, key=lambda each: int(each.rpartition("-")[2]))
    logger.warning(f"no node has kept the state of the run: it goes on from {name}")
    return os.path.join(output, name)


@contextmanager
def without_loading_models(self: Trainer) -> Iterator[None]:
    """While the block runs, a Trainer that goes on from a kept state reads no model from that state's folder.

    The accelerator's state has it. The method of the script's own Trainer may look for files of its own.
    """
    if getattr(self, "_lshdp_kept", None) is None:
        yield
        return
    given = vars(self).get("_load_from_checkpoint")
    self._load_from_checkpoint = lambda *_, **__: None
    try:
        yield
    finally:
        del self._load_from_checkpoint
        if given is not None:
            self._load_from_checkpoint = given


@contextmanager
def kept(self: Trainer) -> Iterator[None]:
    """While the block runs, the state that ranks keep is that of this Trainer's training."""
    keeper = self.accelerator.session.keeper
    if keeper is None:
        yield
        return
    keeper.trainings += 1
    own = getattr(self, "_lshdp_kept", None)
    losses = None if own is None else _Losses(self, own)
    if losses is not None:
        self.add_callback(losses)
    keeper.about_script = lambda: json.dumps(_own_part(self))
    keeper.also_saved = lambda: {
        "custom": [self.lr_scheduler],
        "gradient_accumulation_steps": script_steps(self),
    }
    yield
    # Not where an error leaves the training: it may be the loss of another node, after which the state is kept. What
    # follows the training, such as an evaluation, is done again from its end.
    text = json.dumps(_own_part(self))
    keeper.about_script = lambda: text
    if losses is not None:
        self.remove_callback(losses)


def _own_part(self: Trainer) -> dict[str, Any]:
    """What the Trainer itself knows of its training, as values of JSON."""
    state = dataclasses.asdict(self.state)
    exported = [each for each in [*self.callback_handler.callbacks, self.control] if isinstance(each, ExportableState)]
    callbacks = dict(state["stateful_callbacks"])
    for each in exported:
        name = type(each).__name__
        if isinstance(callbacks.get(name), list):
            callbacks[name] = [*callbacks[name], each.state()]
        else:
            callbacks[name] = each.state()
    state["stateful_callbacks"] = callbacks
    state["is_local_process_zero"] = state["is_world_process_zero"] = True  # each process sets its own
    return {
        "state": state,
        "total_loss": getattr(self, "_total_loss_scalar", 0.0),
        "initial_step": getattr(self, "_initial_global_step", 0),
        "training": self.accelerator.session.keeper.trainings,
    }
