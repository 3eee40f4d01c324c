# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The training loop of all recipes: accelerate code, with `LSHDPAccelerator` in the place of `Accelerator`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import set_seed
from results import write_results
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_scheduler

from accelerate_lshdp import LSDPPlugin, LSHDPAccelerator


def make_accelerator(args: argparse.Namespace, recipe: str, lsdp_plugin: LSDPPlugin | None = None) -> LSHDPAccelerator:
    """An accelerator that follows `--plan`, with the trackers of `--report_to`; seeds this process.

    Args:
        args: the options of the recipe.
        recipe: its name, for trackers.
        lsdp_plugin: options of LSHDP that the recipe chooses itself.
    """
    accelerator = LSHDPAccelerator(
        plan=args.plan,
        batch_sizes=args.batch_sizes,
        total_batch_size=args.total_batch_size,
        lsdp_plugin=lsdp_plugin,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    if args.report_to != "none":
        accelerator.init_trackers(recipe, config=vars(args))
    # The same seed on every rank: the shuffled order of the samples must not depend on the rank.
    set_seed(args.seed)
    return accelerator


def get_dataloaders(args: argparse.Namespace, dataset: Any, collate_fn: Callable) -> tuple[DataLoader, DataLoader]:
    """The loaders for training and evaluation, of the splits `train` and `validation`."""
    train_dataloader = DataLoader(
        dataset["train"],
        shuffle=True,
        collate_fn=collate_fn,
        batch_size=args.per_device_train_batch_size,
        num_workers=args.num_workers,
    )
    eval_dataloader = DataLoader(
        dataset["validation"],
        collate_fn=collate_fn,
        batch_size=args.per_device_eval_batch_size,
        num_workers=args.num_workers,
    )
    return train_dataloader, eval_dataloader


def get_optimizer(args: argparse.Namespace, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW with weight decay for the matrices, and none for biases and layer norms."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        eps=args.adam_epsilon,
    )


def train(
    args: argparse.Namespace,
    accelerator: LSHDPAccelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataloaders: tuple[DataLoader, DataLoader],
    evaluate: Callable[[LSHDPAccelerator, nn.Module, DataLoader], dict[str, float]],
    processor: Any,
) -> None:
    """Train, evaluate after each epoch, save checkpoints, and write the model and `all_results.json`.

    Args:
        args: the options of the recipe (`training_arguments.py`).
        accelerator: from `make_accelerator`.
        model: a model of transformers whose output has a loss.
        optimizer: of its parameters.
        dataloaders: for training and for evaluation.
        evaluate: measures the model on the second one; its numbers are printed, logged and written under their names.
        processor: what makes the model's inputs (a tokenizer, an image processor), saved with the model.
    """
    train_dataloader, eval_dataloader = dataloaders
    train_samples = len(train_dataloader.dataset)
    learning_rate = optimizer.param_groups[0]["lr"]

    # Prepare everything. From here on, train_dataloader yields on each rank as many samples as the plan gives it.
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    # The number of steps is known only now: the plan decides how many samples a global batch has. (The loader's
    # total_batch_size and length are those of training while the model is in training mode.)
    model.train()
    global_batches = math.ceil(train_samples / train_dataloader.total_batch_size)
    steps_per_epoch = math.ceil(global_batches / accelerator.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / steps_per_epoch)
    # A prepared scheduler steps num_processes times in each optimizer step, so its lengths are multiplied by that.
    lr_scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    lr_scheduler = accelerator.prepare(lr_scheduler)

    # Potentially load in the weights and states from a previous save
    completed_steps = 0
    starting_epoch = 0
    if args.resume_from_checkpoint is not None:
        # Given a folder of checkpoints, load_state takes the newest one that is complete on some node.
        latest = args.resume_from_checkpoint == "latest"
        checkpoint = accelerator.load_state(args.output_dir if latest else args.resume_from_checkpoint)
        completed_steps = checkpoint.step
        starting_epoch = train_dataloader.position.epoch
        accelerator.print(f"Resumed from {checkpoint.path}: epoch {starting_epoch}, step {completed_steps}.")
    first_step = completed_steps

    losses, measured = [], None
    progress_bar = tqdm(total=args.max_train_steps, initial=completed_steps, disable=not accelerator.is_main_process)
    # Now we train the model
    for epoch in range(starting_epoch, args.num_train_epochs):
        if completed_steps >= args.max_train_steps:
            break
        model.train()
        # Sums of this rank since the last optimizer step, to log the loss of the whole global batch.
        loss_sum = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        resumed = args.resume_from_checkpoint is not None and epoch == starting_epoch
        # After load_state, skip_first_batches without a number continues behind the samples that were already seen.
        active_dataloader = accelerator.skip_first_batches(train_dataloader) if resumed else train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                # The mean over this rank's samples (or tokens), as always: the accelerator weights it by their number.
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm > 0:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            # Not len(batch): a rank left without a sample repeats one, which does not count. Tokens are counted where
            # the accelerator was told that losses are means over them.
            place = accelerator.batch_place
            count = torch.tensor(place.samples if place.tokens is None else place.tokens, dtype=torch.float64)
            count = count.to(loss.device)
            # The mean over no token is NaN, and counts for nothing.
            loss_sum += torch.stack([torch.where(count > 0, loss.detach().double() * count, 0.0), count])
            if accelerator.sync_gradients:
                total_loss, total_count = accelerator.reduce(loss_sum, reduction="sum").tolist()
                losses.append(total_loss / total_count)
                loss_sum.zero_()
                completed_steps += 1
                progress_bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
                progress_bar.update(1)
                accelerator.log(
                    {"train_loss": losses[-1], "learning_rate": lr_scheduler.get_last_lr()[0]}, step=completed_steps
                )
                if isinstance(args.checkpointing_steps, int) and completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(f"{args.output_dir}/step_{completed_steps}")
                if completed_steps >= args.max_train_steps:
                    break

        if args.checkpointing_steps == "epoch":
            accelerator.save_state(f"{args.output_dir}/step_{completed_steps}")
        measured = evaluate(accelerator, model, eval_dataloader)
        # Use accelerator.print to print only on the main process.
        accelerator.print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.4f}" for name, value in measured.items()))
        accelerator.log({**measured, "epoch": epoch}, step=completed_steps)
    progress_bar.close()
    if measured is None:  # resumed from the last checkpoint of a run that had nothing left to train
        measured = evaluate(accelerator, model, eval_dataloader)

    # The final model, as from_pretrained expects it
    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).config.save_pretrained(args.output_dir)
        processor.save_pretrained(args.output_dir)
    write_results(
        accelerator,
        args.output_dir,
        {
            **measured,
            "batch_sizes": accelerator.plan.batch_sizes
            or [args.per_device_train_batch_size] * accelerator.num_processes,
            "first_step": first_step,
            "completed_steps": completed_steps,
            "learning_rate": learning_rate,
            "losses": losses,
        },
    )
    accelerator.end_training()
