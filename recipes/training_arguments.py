# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The command line options that every recipe has: model, optimization, precision, checkpoints, tracking, the plan."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

from accelerate.state import AcceleratorState
from learning_rate import LR_SCALINGS


def positive_int(text: str) -> int:
    """Parse a whole number >= 1 (argparse `type`)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def share(text: str) -> float:
    """Parse a number above 0 and at most 1 (argparse `type`)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, found {text!r}")
    return value


def checkpoint_interval(text: str) -> int | str:
    """Parse `--checkpointing_steps`: a number of optimizer steps, or `epoch` (argparse `type`)."""
    if text == "epoch":
        return text
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected a number of optimizer steps (at least 1) or 'epoch', found {text!r}"
        ) from None


def add_model_arguments(parser: argparse.ArgumentParser, configs: Iterable[str], named: str, new: str) -> None:
    """Add the options that choose the model: a trained one by its name, or a new one by its configuration.

    Args:
        parser: of the recipe.
        configs: names of configurations; the first is the default.
        named: what `--model_name_or_path` may be.
        new: what `--model_config` makes.
    """
    configs = list(configs)
    parser.add_argument("--model_name_or_path", help=named)
    parser.add_argument("--model_config", choices=configs, help=f"{new} (default: {configs[0]}).")


def check_model_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a message if the model is chosen twice."""
    if args.model_name_or_path is not None and args.model_config is not None:
        parser.error("--model_name_or_path and --model_config both choose the model: give one of them.")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options shared by the recipes. A recipe changes defaults with `parser.set_defaults`."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--plan",
        help="Plan file of LSHDP: how much every rank does, and the sharding strategy. "
        "Without it the environment variable ACCELERATE_LSHDP_PLAN is read, if set.",
    )
    group.add_argument(
        "--batch_sizes",
        choices=["auto"],
        help="auto: the run finds out itself how to divide --total_batch_size samples over the ranks, beginning with "
        "the plan's sizes or equal ones, and goes on doing so when a rank becomes slower or faster.",
    )
    group.add_argument(
        "--total_batch_size",
        type=positive_int,
        help="Samples in a global batch, for --batch_sizes auto; a plan with batch sizes says it already.",
    )
    group.add_argument(
        "--per_device_train_batch_size",
        type=positive_int,
        default=16,
        help="Samples a rank and micro-batch. Replaced by the plan, where the plan gives batch sizes.",
    )
    group.add_argument("--per_device_eval_batch_size", type=positive_int, default=32)
    group.add_argument("--gradient_accumulation_steps", type=positive_int, default=1)
    group.add_argument("--learning_rate", type=float, default=1e-3, help="Learning rate after the warmup.")
    group.add_argument(
        "--lr_scaling",
        choices=LR_SCALINGS,
        default="none",
        help="What to do with the learning rate when the plan's global batch is not per_device_train_batch_size x "
        "processes: multiply it by the ratio (linear), by its square root (sqrt), or leave it alone (default: none).",
    )
    group.add_argument("--weight_decay", type=float, default=0.01)
    group.add_argument("--adam_epsilon", type=float, default=1e-8)
    group.add_argument("--lr_scheduler_type", default="linear", help="A scheduler name of transformers.get_scheduler.")
    group.add_argument("--num_warmup_steps", type=int, default=10, help="Optimizer steps of learning rate warmup.")
    group.add_argument("--max_grad_norm", type=float, default=1.0, help="0 turns gradient clipping off.")
    group.add_argument("--num_train_epochs", type=positive_int, default=3)
    group.add_argument(
        "--max_train_steps", type=positive_int, help="Total optimizer steps; overrides --num_train_epochs."
    )
    group.add_argument(
        "--mixed_precision", choices=["no", "fp16", "bf16"], help="Default: what the accelerate configuration says."
    )
    group.add_argument("--num_workers", type=int, default=0, help="Processes that load data, a rank.")
    group.add_argument("--seed", type=int, default=42)

    group = parser.add_argument_group("output")
    group.add_argument("--output_dir", required=True, help="Final model, all_results.json, checkpoints and logs.")
    group.add_argument(
        "--checkpointing_steps",
        type=checkpoint_interval,
        help="Save a checkpoint every this many optimizer steps, or 'epoch' for one at the end of each epoch.",
    )
    group.add_argument(
        "--resume_from_checkpoint",
        metavar="PATH",
        help="Continue from this checkpoint, in mid-epoch too; 'latest' is the newest in --output_dir.",
    )
    group.add_argument(
        "--report_to",
        default="none",
        help="Experiment tracker: 'tensorboard', another of accelerate's, 'all' or 'none'.",
    )


def check_profiled_precision(args: argparse.Namespace) -> None:
    """For `profiling_subject`, where `accelerate-lshdp profile` has made the accelerator and not the recipe.

    Raises:
        ValueError: `--mixed_precision` is not what is being measured.
    """
    measured = AcceleratorState().mixed_precision
    if args.mixed_precision not in (None, measured):
        raise ValueError(
            f"--mixed_precision {args.mixed_precision} is for the training, but this profile would measure "
            f"'{measured}'. Give it to accelerate-lshdp profile, too: --mixed-precision {args.mixed_precision}."
        )
