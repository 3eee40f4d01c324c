# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""All that a Trainer does differently with an `LSHDPAccelerator`: `hook` gives it these methods.

The Trainer assumes equal batches: in the number of its steps, in losses and their logs, in checkpoints. Each method
overrides that of `transformers.Trainer` and calls it. Methods of a script's own Trainer come before these, as they
come before those of `transformers.Trainer`. What can be right in the accelerator is right there, for scripts with
loops of their own too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from accelerate_lshdp.accelerator.step_logs import step_logs
from accelerate_lshdp.checkpoint.model import plain_name
from accelerate_lshdp.data.loader import EVALUATION, TRAINING, HeterogeneousDataLoader
from accelerate_lshdp.data.weighting import weigh
from accelerate_lshdp.engine.stores.fsdp2.whole_states import whole_states
from accelerate_lshdp.runtime.elastic_rank import ranks_at_start
from accelerate_lshdp.trainer import checkpoints, kept_state
from accelerate_lshdp.trainer.accumulation import accumulation_of_script, own_accumulation, script_steps
from accelerate_lshdp.trainer.agreed_stop import keeping_the_stopped_step, stopping_at_signals
from accelerate_lshdp.trainer.checks import check_arguments, check_train_loader, warn_of_weighting
from accelerate_lshdp.trainer.losses import TrainerLosses


class TrainerOverrides(Trainer):
    """Training, losses, logs and checkpoints of a Trainer with unequal batches."""

    def _lshdp_drives(self) -> None:
        """Says that this Trainer, not a loop of the script, asks for batches: it knows the plan's total."""
        self.accelerator.session.total.leave_to_trainer()

    # Batches and steps

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Resumes all ranks from one checkpoint, the newest that any node has if the script leaves the choice."""
        self._lshdp_drives()
        resume_from_checkpoint = kept_state.to_continue_from(self) or resume_from_checkpoint
        if resume_from_checkpoint:
            resume_from_checkpoint = checkpoints.checkpoint_of_all_nodes(self, resume_from_checkpoint)
        with kept_state.without_loading_models(self):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._lshdp_drives()
        check_arguments(self)
        warn_of_weighting(self)
        # Anew: a second training may have another model or loss.
        self._lshdp_losses, self._lshdp_tokens = TrainerLosses(self), 0
        # On the instance, so that a training_step that a script has put there is covered as well.
        given = vars(self).get("training_step")
        self.training_step = functools.partial(_training_step, self.training_step, self)
        try:
            # The accelerator may be used in a loop of the script's own afterwards.
            with (
                self.accelerator.weighting_left_to_caller(),
                accumulation_of_script(self),
                checkpoints.skipping_in_samples(),
                stopping_at_signals(self),
                kept_state.kept(self),
            ):
                return super()._inner_training_loop(*args, **kwargs)
        finally:
            del self.training_step
            if given is not None:
                self.training_step = given

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Counts this rank's micro-batches, of a loader that could not tell yet that it will train."""
        self._lshdp_drives()
        check_train_loader(self, dataloader)
        _set_purpose(dataloader, TRAINING)
        if self.accelerator.plan.leaves_total_open:
            self.accelerator.session.settle_total(dataloader.total_batch_size)
        with own_accumulation(self):
            return super().set_initial_training_values(args, dataloader)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Counts the micro-batches that this rank has had in the epoch."""
        with own_accumulation(self):
            result = super()._init_training_state(*args, **kwargs)
        checkpoints.agree_on_best_checkpoint(self, self.args.output_dir)
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # of a training that is continued from its very end
            self.control.should_training_stop = True
            return
        with own_accumulation(self):
            super()._run_epoch(*args, **kwargs)

    def get_total_train_batch_size(self, args: Any) -> int:
        self._lshdp_drives()
        planned = self.accelerator.plan.total_batch_size
        if planned is not None:
            return planned * script_steps(self)
        ranks = self.accelerator.num_processes
        return super().get_total_train_batch_size(args) // ranks * ranks_at_start(ranks)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self._lshdp_drives()
        _set_purpose(dataloader, EVALUATION)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Says what the loader is for: callbacks may use it too, and checkpoints keep positions of training alone."""
        self._lshdp_drives()
        method = super()._get_dataloader
        is_training = inspect.signature(method).bind(*args, **kwargs).arguments.get("is_training", False)
        loader = method(*args, **kwargs)
        _set_purpose(loader, TRAINING if is_training else EVALUATION)
        return loader

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Groups samples of similar length in global batches, not in those of one rank."""
        self._lshdp_drives()
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size = self.get_total_train_batch_size(self.args)
        return sampler

    # Losses, logs

    @property
    def lshdp_losses(self) -> TrainerLosses:
        """How much the losses of this Trainer count."""
        if not hasattr(self, "_lshdp_losses"):
            self._lshdp_losses = TrainerLosses(self)
        return self._lshdp_losses

    def _get_num_items_in_batch(self, batch_samples: list, device: Any) -> Any:
        count = super()._get_num_items_in_batch
        if not batch_samples:
            return count(batch_samples, device)
        places = self.accelerator.places_of(batch_samples)
        return self.lshdp_losses.count_items(lambda batches: count(batches, device), batch_samples, places)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Sums over ranks once a step: ranks may have different numbers of micro-batches."""
        if self.args.include_num_input_tokens_seen == "no":
            return
        accelerator, before = self.accelerator, self.state.num_input_tokens_seen
        given = vars(accelerator).get("gather")
        accelerator.gather = lambda tokens: tokens
        try:
            super()._track_num_input_tokens(inputs)
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

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # the accelerator's clipping spans all meshes

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Averages the loss of the steps since the last log over ranks, as that of the others was."""
        self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        checkpoints.warn_of_lost_best_checkpoint(self)
        with keeping_the_stopped_step(self):
            return super()._finalize_training(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(step_logs(self.accelerator.step_statistics, self.accelerator.batch_place))
        super().log(logs, *args, **kwargs)

    # Checkpoints: see `checkpoints`

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Saves the arguments as the script gave them."""
        now, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, script_steps(self)
        try:
            super()._save(*args, **kwargs)
        finally:
            self.args.gradient_accumulation_steps = now

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gives the Trainer the whole model of a sharded strategy (collective)."""
        if not self.accelerator.policies.is_sharded:
            return super().save_model(output_dir, _internal_call)
        output_dir = self.args.output_dir if output_dir is None else output_dir
        state, error = self.accelerator.get_state_dict(self.model), None
        if self.args.should_save:  # asked here too: a script's own _save may leave that to this method
            try:
                # Also for a _save that does not look at `state_dict`, but lets the model save itself.
                with whole_states(self.accelerator.unwrap_model(self.model), state, plain_name):
                    self._save(output_dir, state_dict=state)
            except Exception as found:  # a script's code may raise anything, on this rank alone
                error = found
        self.accelerator.session.raise_everywhere(error)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.save_state(self, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: the accelerator's state has it."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoints.complete_on_all_nodes(self, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leaves the model to the accelerator's state, if the checkpoint has one."""
        if not checkpoints.resumes_state(self):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not checkpoints.load_state(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing after the accelerator's state, which had it."""
        if not checkpoints.resumes_state(self):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if not checkpoints.load_best_model(self):
            super()._load_best_model()


def _set_purpose(dataloader: Any, purpose: str) -> None:
    if isinstance(dataloader, HeterogeneousDataLoader):
        dataloader.purpose = purpose


def _training_step(
    step: Callable[..., Any], self: TrainerOverrides, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Weights the loss by this micro-batch's share, also the one that is logged: a mean over ranks is then exact."""
    accelerator = self.accelerator
    accelerator.choose_batch(inputs)
    with accelerator.accumulate(model):
        share = self.lshdp_losses.share(accelerator.batch_place, num_items_in_batch)
        with accelerator.counting_losses(share, self.lshdp_losses.see):
            loss = step(model, inputs, num_items_in_batch)
    return weigh(loss, share * accelerator.num_processes)
