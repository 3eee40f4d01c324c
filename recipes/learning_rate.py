# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The learning rate for a plan whose global batch is larger or smaller than the script's own."""

from __future__ import annotations

import argparse
import math

from accelerate.logging import get_logger

from accelerate_lshdp import LSHDPAccelerator


logger = get_logger(__name__)

LR_SCALINGS = ("none", "linear", "sqrt")


def scaled_learning_rate(args: argparse.Namespace, accelerator: LSHDPAccelerator) -> float:
    """`--learning_rate`, scaled as `--lr_scaling` says if the plan puts another number of samples into a step.

    The learning rate is meant for what the script would train on without a plan: `per_device_train_batch_size` x
    processes x `gradient_accumulation_steps`. If a step has r times as many samples, `linear` multiplies the learning
    rate by r (Goyal et al. 2017, for SGD), `sqrt` by the square root of r (Malladi et al. 2022, for Adam), and `none`
    leaves it alone. Each says what it did.
    """
    base = args.per_device_train_batch_size * accelerator.num_processes
    total = accelerator.plan.total_batch_size or base
    # The script's own accumulation multiplies both: under a plan, a step is so many of the plan's global batches.
    base *= accelerator.gradient_accumulation_steps
    total *= accelerator.gradient_accumulation_steps
    if total == base:
        return args.learning_rate
    ratio = total / base
    learning_rate = args.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[args.lr_scaling]
    if args.lr_scaling == "none":
        verdict = f"The learning rate stays {learning_rate:g} (--lr_scaling none; linear or sqrt would change it)."
    else:
        verdict = (
            f"--lr_scaling {args.lr_scaling} makes the learning rate {learning_rate:g}, from {args.learning_rate:g}."
        )
    logger.info(f"A step has {total} samples under the plan, {base} without it: {ratio:.3g} times as many. {verdict}")
    return learning_rate
