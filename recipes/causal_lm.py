# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What the recipes of causal language models have in common: everything but the configuration of the model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from datasets import DatasetDict
from learning_rate import scaled_learning_rate
from text_data import (
    add_text_arguments,
    check_same_text,
    check_text_arguments,
    choose_block_size,
    group_into_blocks,
    load_text,
)
from token_evaluation import evaluate_tokens
from training_arguments import (
    add_model_arguments,
    add_training_arguments,
    check_model_arguments,
    check_profiled_precision,
)
from training_loop import get_dataloaders, get_optimizer, make_accelerator, train

from accelerate_lshdp import LSDPPlugin
from accelerate_lshdp.profiling import Subject


#: Makes the model and its tokenizer from the options of the recipe and the text.
BuildModel = Callable[[argparse.Namespace, DatasetDict], tuple[Any, Any]]


def parse_causal_lm_args(
    argv: list[str] | None, model: str, configs: Iterable[str], example: str
) -> argparse.Namespace:
    """The options of a recipe that trains a causal language model.

    Args:
        argv: the command line; None: that of the process.
        model: what is trained, for people.
        configs: names of its configurations, the default first.
        example: the name of one on the Hub.
    """
    parser = argparse.ArgumentParser(description=f"Train {model} language model with LSHDP.")
    add_model_arguments(
        parser,
        configs,
        named=f"A causal language model of the Hub, e.g. {example}, or a folder.",
        new=f"Instead, {model} with random weights and a tokenizer trained on the training text",
    )
    add_text_arguments(parser)
    add_training_arguments(parser)
    parser.set_defaults(per_device_train_batch_size=8, learning_rate=1e-3, num_train_epochs=1)
    args = parser.parse_args(argv)
    check_text_arguments(parser, args)
    check_model_arguments(parser, args)
    return args


def load_blocks_and_model(args: argparse.Namespace, build_model: BuildModel) -> tuple[DatasetDict, Any, Any]:
    """The text in blocks of tokens, the model and its tokenizer."""
    dataset = load_text(args)
    model, tokenizer = build_model(args, dataset)
    blocks = group_into_blocks(dataset, tokenizer, choose_block_size(args, model), separator=tokenizer.eos_token_id)
    return blocks, model, tokenizer


def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of blocks; the model itself shifts the labels, so that each token is predicted by those before it."""
    input_ids = torch.tensor([example["input_ids"] for example in examples])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def profiled_causal_lm(args: argparse.Namespace, build_model: BuildModel) -> Subject:
    """What `accelerate-lshdp profile` measures: model, data and optimizer of a training with these options."""
    check_profiled_precision(args)
    blocks, model, _ = load_blocks_and_model(args, build_model)
    train_dataloader, _ = get_dataloaders(args, blocks, collate)
    return Subject(model, train_dataloader, get_optimizer(args, model, args.learning_rate))


def train_causal_lm(args: argparse.Namespace, build_model: BuildModel, recipe: str) -> None:
    """The whole training; `recipe` is its name, for trackers."""
    # Initialize the accelerator. It reads the plan, and does the rest of what accelerate's Accelerator does. Weighting
    # by tokens makes the gradient that of the mean over all tokens of the global batch, however the ranks share it.
    accelerator = make_accelerator(args, recipe, LSDPPlugin(loss_weighting="tokens"))
    # Every node prepares the data once, and its other processes find it in the cache.
    with accelerator.local_main_process_first():
        blocks, model, tokenizer = load_blocks_and_model(args, build_model)
    check_same_text(args, accelerator, blocks["train"]["input_ids"])
    dataloaders = get_dataloaders(args, blocks, collate)
    optimizer = get_optimizer(args, model, scaled_learning_rate(args, accelerator))
    train(args, accelerator, model, optimizer, dataloaders, partial(evaluate_tokens, next_token=True), tokenizer)
