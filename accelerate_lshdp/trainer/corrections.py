# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the Trainer assumes of equal batches, corrected: batches, steps, losses and logs.

Each function below replaces the Trainer's method of its name for Trainers with an `LSHDPAccelerator`. Its first
argument is the method as it was.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from accelerate_lshdp.accelerator.accelerator import LSHDPAccelerator
from accelerate_lshdp.data.loader import EVALUATION, TRAINING, HeterogeneousDataLoader
from accelerate_lshdp.data.weighting import weigh
from accelerate_lshdp.trainer import checkpoints
from accelerate_lshdp.trainer.accumulation import accumulation_of_script, own_accumulation, script_steps
from accelerate_lshdp.trainer.checks import check_arguments, check_train_loader, warn_of_weighting
from accelerate_lshdp.trainer.losses import TrainerLosses
from accelerate_lshdp.trainer.statistics import step_logs


def correct_trainer() -> None:
    """Corrects `transformers.Trainer`, once.

    Raises:
        AttributeError: this version of transformers has no such methods.
    """
    corrections = {function.__name__: function for function in (*_CORRECTIONS, *checkpoints.CORRECTIONS)}
    missing = [name for name in corrections if not hasattr(Trainer, name)]
    if missing:
        raise AttributeError(f"found no {', '.join(missing)}")
    for name, correction in corrections.items():
        setattr(Trainer, name, _corrected(getattr(Trainer, name), correction))
    trainer.skip_first_batches = functools.partial(checkpoints.skip_first_batches, trainer.skip_first_batches)


def _corrected(original: Callable[..., Any], correction: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.accelerator, LSHDPAccelerator):
            self.accelerator.run_total.leave_to_trainer()
            return correction(functools.partial(original, self), self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return method


def losses_of(self: Trainer) -> TrainerLosses:
    if not hasattr(self, "_lshdp_losses"):
        self._lshdp_losses = TrainerLosses(self)
    return self._lshdp_losses


# Batches and steps


def _inner_training_loop(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    check_arguments(self)
    warn_of_weighting(self)
    # Anew: a second training may have another model or loss.
    self._lshdp_losses, self._lshdp_tokens = TrainerLosses(self), 0
    # On the instance, so that a training_step of a subclass is covered too.
    given = vars(self).get("training_step")
    self.training_step = functools.partial(_training_step, self.training_step, self)
    try:
        # The accelerator may be used in a loop of the script's own afterwards.
        with self.accelerator.weighting_left_to_caller(), accumulation_of_script(self):
            return original(*args, **kwargs)
    finally:
        del self.training_step
        if given is not None:
            self.training_step = given


def set_initial_training_values(original: Callable[..., Any], self: Trainer, args: Any, dataloader: Any) -> Any:
    """Counts this rank's micro-batches, of a loader that could not tell yet that it will train."""
    check_train_loader(self, dataloader)
    _set_purpose(dataloader, TRAINING)
    if self.accelerator.plan.leaves_total_open:
        self.accelerator.run_total.settle(dataloader.total_batch_size)
    with own_accumulation(self):
        return original(args, dataloader)


def _init_training_state(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Counts the micro-batches that this rank has had in the epoch."""
    with own_accumulation(self):
        result = original(*args, **kwargs)
    checkpoints.agree_on_best_checkpoint(self, self.args.output_dir)
    return result


def _run_epoch(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> None:
    with own_accumulation(self):
        original(*args, **kwargs)


def _save(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> None:
    """Saves the arguments as the script gave them."""
    now, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, script_steps(self)
    try:
        original(*args, **kwargs)
    finally:
        self.args.gradient_accumulation_steps = now


def get_total_train_batch_size(original: Callable[..., Any], self: Trainer, args: Any) -> int:
    planned = self.accelerator.plan.total_batch_size
    return original(args) if planned is None else planned * script_steps(self)


def evaluation_loop(original: Callable[..., Any], self: Trainer, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    _set_purpose(dataloader, EVALUATION)
    return original(dataloader, *args, **kwargs)


def _set_purpose(dataloader: Any, purpose: str) -> None:
    if isinstance(dataloader, HeterogeneousDataLoader):
        dataloader.purpose = purpose


def _get_dataloader(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Says what the loader is for: callbacks may use it too, and checkpoints keep positions of training alone."""
    is_training = inspect.signature(original).bind(*args, **kwargs).arguments.get("is_training", False)
    loader = original(*args, **kwargs)
    _set_purpose(loader, TRAINING if is_training else EVALUATION)
    return loader


def _get_train_sampler(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Groups samples of similar length in global batches, not in those of one rank."""
    sampler = original(*args, **kwargs)
    if isinstance(sampler, LengthGroupedSampler):
        sampler.batch_size = self.get_total_train_batch_size(self.args)
    return sampler


# Losses


def _training_step(
    step: Callable[..., Any], self: Trainer, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Weights the loss by this micro-batch's share, also the one that is logged: a mean over ranks is then exact."""
    accelerator = self.accelerator
    accelerator.choose_batch(inputs)
    with accelerator.accumulate(model):
        share = losses_of(self).share(accelerator.batch_place, num_items_in_batch)
        with accelerator.counting_losses(share):
            loss = step(model, inputs, num_items_in_batch)
    return weigh(loss, share * accelerator.num_processes)


def _get_num_items_in_batch(original: Callable[..., Any], self: Trainer, batch_samples: list, device: Any) -> Any:
    if not batch_samples:
        return original(batch_samples, device)
    return losses_of(self).count_items(
        lambda batches: original(batches, device), batch_samples, self.accelerator.places_of(batch_samples)
    )


def _track_num_input_tokens(original: Callable[..., Any], self: Trainer, inputs: Any) -> None:
    """Sums over ranks once a step: ranks may have different numbers of micro-batches."""
    if self.args.include_num_input_tokens_seen == "no":
        return
    accelerator, before = self.accelerator, self.state.num_input_tokens_seen
    given = vars(accelerator).get("gather")
    accelerator.gather = lambda tokens: tokens
    try:
        original(inputs)
    finally:
        del accelerator.gather
        if given is not None:
            accelerator.gather = given
    place = accelerator.batch_place
    own = 0 if place is not None and place.samples == 0 else self.state.num_input_tokens_seen - before
    self._lshdp_tokens = getattr(self, "_lshdp_tokens", 0) + own
    self.state.num_input_tokens_seen = before
    if accelerator.sync_gradients:
        tokens = torch.tensor(self._lshdp_tokens, dtype=torch.int64, device=self.args.device)
        self.state.num_input_tokens_seen += int(accelerator.gather(tokens).sum())
        self._lshdp_tokens = 0


def _has_mixed_mesh_grads(original: Callable[..., Any], self: Trainer, model: Any) -> bool:
    return False  # the accelerator's clipping spans all meshes


# Logs


def _finalize_training(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Averages the loss of the steps since the last log over ranks, as that of the others was."""
    self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
    checkpoints.warn_of_lost_best_checkpoint(self)
    return original(*args, **kwargs)


def log(original: Callable[..., Any], self: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    if "loss" in logs:
        logs.update(step_logs(self.accelerator))
    original(logs, *args, **kwargs)


_CORRECTIONS = (
    _inner_training_loop,
    set_initial_training_values,
    _init_training_state,
    _run_epoch,
    _save,
    get_total_train_batch_size,
    evaluation_loop,
    _get_dataloader,
    _get_train_sampler,
    _get_num_items_in_batch,
    _track_num_input_tokens,
    _has_mixed_mesh_grads,
    _finalize_training,
    log,
)
