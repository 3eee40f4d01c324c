# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A Trainer that is told to end by a signal: all its ranks save after the same step, and end as if trained.

The Trainer's own way, ``enable_jit_checkpoint``, saves on the rank that has got the signal, at once. Other ranks go on
training, and wait for it; with several ranks it hangs. So it is replaced while the Trainer trains.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


logger = logging.getLogger(__name__)


class AgreedStop(TrainerCallback):
    """Saves and ends a training once ranks have agreed on it.

    Args:
        accelerator: whose ranks agree.

    Attributes:
        managers: of the Trainer's own way, which may have got a signal before the training began.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.managers: list[Any] = []

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        requests = self._accelerator.session.stop_requests
        if any(manager.is_checkpoint_requested for manager in self.managers) and not requests.received:
            requests.received = int(signal.SIGTERM)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._accelerator.stop_requested:
            name = signal.Signals(self._accelerator.session.stop_requests.agreed).name
            if state.is_world_process_zero:
                logger.warning("%s has come to a rank: all of them save step %d and end", name, state.global_step)
            control.should_save, control.should_training_stop = True, True
            control.should_evaluate = False  # there may be little time

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._accelerator.stop_requested:  # the step is saved already
            control.should_save = control.should_evaluate = False


@contextmanager
def stopping_at_signals(trainer: Any) -> Iterator[None]:
    """Lets SIGTERM and SIGUSR1 save and end a Trainer's training on all ranks, while the block runs.

    Only where it saves at all: by ``save_strategy``, or by ``enable_jit_checkpoint``. Else signals end the process. A
    process that was told to end before the block ends this training after its first step.
    """
    wanted = getattr(trainer.args, "enable_jit_checkpoint", False)
    requests = trainer.accelerator.session.stop_requests
    if not wanted and trainer.args.save_strategy == "no":
        yield
        return
    callback = AgreedStop(trainer.accelerator)
    # Last, so that no other one asks for an evaluation after it.
    trainer.add_callback(callback)
    # In another thread than the main one nothing has begun, and a script's own `stop_on_signals` stays in force.
    watching = requests.watch()
    replaced = _leave_out_own_way(trainer) if watching else []
    callback.managers = [manager for _, manager in replaced]
    try:
        yield
    finally:
        trainer.remove_callback(callback)
        if watching:
            requests.leave()
        for own, manager in replaced:
            own.jit_manager = manager
            # It gives the signal back, as it does when a training ends.
            own.on_train_end(trainer.args, trainer.state, trainer.control)


@contextmanager
def keeping_the_stopped_step(trainer: Any) -> Iterator[None]:
    """Keeps the checkpoint of a training that was told to end, while the Trainer removes all but the best one."""
    limit = trainer.args.save_total_limit
    if trainer.accelerator.stop_requested:
        trainer.args.save_total_limit = None
    try:
        yield
    finally:
        trainer.args.save_total_limit = limit


def _leave_out_own_way(trainer: Any) -> list[tuple[Any, Any]]:
    """Keeps the Trainer's own callback from saving; returns it, and what it saves by."""
    found = []
    for callback in trainer.callback_handler.callbacks:
        manager = getattr(callback, "jit_manager", None)
        if manager is not None:
            found.append((callback, manager))
            callback.jit_manager = None
    return found
