# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Train a BERT with LSHDP: as a masked language model, or as a classifier of texts.

By default it trains a small BERT to predict masked tokens of the source code of Python's standard library, which needs
no download:

    accelerate launch --config_file accelerate_configs/cpu_1x2.yaml \
        recipes/bert_text_tasks.py --plan plan.json --output_dir outputs/bert

With `--task classification` it learns to tell code, comments and docstrings of the same library apart:

    accelerate launch --config_file accelerate_configs/cpu_1x2.yaml \
        recipes/bert_text_tasks.py --task classification --plan plan.json --output_dir outputs/bert

Fine-tune a real one with `--model_name_or_path google-bert/bert-base-uncased`. Other text: `--dataset_name glue
--dataset_config_name sst2 --text_column sentence`, or `--train_file FILE` (.txt, .json or .csv).

This file has the two tasks and the model. `text_data.py` loads and cuts the text, `masked_blocks.py` masks it,
`training_loop.py` trains.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial

from classification import class_options, evaluate_classes, load_metric
from datasets import DatasetDict
from embedded_data import bert_tokenizer
from hub import load_text_model
from learning_rate import scaled_learning_rate
from masked_blocks import MaskedBlocks, NewlyMaskedBlocks
from text_data import (
    add_text_arguments,
    check_same_text,
    check_text_arguments,
    choose_block_size,
    group_into_blocks,
    load_labelled_text,
    load_text,
)
from token_evaluation import evaluate_tokens
from torch.utils.data import DataLoader
from training_arguments import (
    add_model_arguments,
    add_training_arguments,
    check_model_arguments,
    check_profiled_precision,
    share,
)
from training_loop import get_dataloaders, get_optimizer, make_accelerator, train
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    default_data_collator,
)

from accelerate_lshdp import LSDPPlugin
from accelerate_lshdp.profiling import Subject


MASKED_LM, CLASSIFICATION = "masked_lm", "classification"
# No dropout anywhere: then two runs with different plans draw the same loss curve, and can be laid over each other.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODEL_CONFIGS = {
    "small": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "max_position_embeddings": 256,
        **NO_DROPOUT,
    },
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **NO_DROPOUT},
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        **NO_DROPOUT,
    },
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a BERT with LSHDP.")
    parser.add_argument(
        "--task",
        choices=[MASKED_LM, CLASSIFICATION],
        default=MASKED_LM,
        help="Predict masked tokens (default), or the class of a text.",
    )
    add_model_arguments(
        parser,
        MODEL_CONFIGS,
        named="An encoder of the Hub, e.g. google-bert/bert-base-uncased, or a folder. A classifier's head is new.",
        new="Instead, a BERT with random weights and a tokenizer trained on the training text",
    )
    add_text_arguments(parser)
    parser.add_argument(
        "--label_column", help="Classification: the column of classes. Default: 'label', else the first of its kind."
    )
    parser.add_argument(
        "--mask_probability", type=share, default=0.15, help="Masked language model: share of tokens to be predicted."
    )
    add_training_arguments(parser)
    parser.set_defaults(per_device_train_batch_size=16, learning_rate=1e-3, num_train_epochs=1)
    args = parser.parse_args(argv)
    check_text_arguments(parser, args)
    check_model_arguments(parser, args)
    return args


def build_model(args: argparse.Namespace, dataset: DatasetDict):
    """The model for the task, and its tokenizer."""
    classifies = args.task == CLASSIFICATION
    options = class_options(dataset["train"].features["label"].names) if classifies else {}
    if args.model_name_or_path is not None:
        if classifies:
            options["ignore_mismatched_sizes"] = True  # a head for other classes is replaced
        auto_class = AutoModelForSequenceClassification if classifies else AutoModelForMaskedLM
        return load_text_model(args.model_name_or_path, auto_class, **options)
    tokenizer = bert_tokenizer(dataset["train"]["text"])
    config = BertConfig(
        **MODEL_CONFIGS[args.model_config or "small"],
        **options,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    return (BertForSequenceClassification if classifies else BertForMaskedLM)(config), tokenizer


def load_rows_and_model(args: argparse.Namespace):
    """The rows of both splits as tokens, the model and its tokenizer."""
    if args.task == MASKED_LM:
        dataset = load_text(args)
        model, tokenizer = build_model(args, dataset)
        rows = group_into_blocks(
            dataset,
            tokenizer,
            choose_block_size(args, model),
            separator=tokenizer.sep_token_id,
            first=[tokenizer.cls_token_id],
            last=[tokenizer.sep_token_id],
        )
        return rows, model, tokenizer

    dataset = load_labelled_text(args)
    model, tokenizer = build_model(args, dataset)
    length = choose_block_size(args, model)

    def encode(examples):
        # All of one length: then a batch of so many samples takes as long as any other, as plans assume.
        return tokenizer(examples["text"], truncation=True, max_length=length, padding="max_length")

    return dataset.map(encode, batched=True, remove_columns=["text"]), model, tokenizer


def get_task_dataloaders(args: argparse.Namespace, rows: DatasetDict, tokenizer) -> tuple[DataLoader, DataLoader]:
    """The loaders for training and evaluation."""
    if args.task == CLASSIFICATION:
        return get_dataloaders(args, rows, default_data_collator)
    masks = {"tokenizer": tokenizer, "probability": args.mask_probability, "seed": args.seed}
    # New masks in every epoch of the training; the same in every evaluation, so that they can be compared.
    blocks = {
        "train": NewlyMaskedBlocks(rows["train"], **masks),
        "validation": MaskedBlocks(rows["validation"], **masks),
    }
    return get_dataloaders(args, blocks, default_data_collator)


def profiling_subject(argv: list[str]) -> Subject:
    """What `accelerate-lshdp profile` measures: model, data and optimizer of a training with these arguments."""
    args = parse_args(argv)
    check_profiled_precision(args)
    rows, model, tokenizer = load_rows_and_model(args)
    train_dataloader, _ = get_task_dataloaders(args, rows, tokenizer)
    return Subject(model, train_dataloader, get_optimizer(args, model, args.learning_rate))


def training_function(args: argparse.Namespace) -> None:
    # Initialize the accelerator. It reads the plan, and does the rest of what accelerate's Accelerator does. The loss
    # of a masked language model is a mean over the chosen tokens, of which samples have different numbers: weighting
    # by tokens makes the gradient that of the mean over all of the global batch. A classifier's is one over samples.
    weighting = "tokens" if args.task == MASKED_LM else "sample"
    accelerator = make_accelerator(args, "bert_text_tasks", LSDPPlugin(loss_weighting=weighting))
    # Every node prepares the data once, and its other processes find it in the cache.
    with accelerator.local_main_process_first():
        rows, model, tokenizer = load_rows_and_model(args)
    check_same_text(args, accelerator, rows["train"]["input_ids"])
    dataloaders = get_task_dataloaders(args, rows, tokenizer)
    optimizer = get_optimizer(args, model, scaled_learning_rate(args, accelerator))
    if args.task == MASKED_LM:
        evaluate = partial(evaluate_tokens, next_token=False)
    else:
        evaluate = partial(evaluate_classes, metric=load_metric(args))
    train(args, accelerator, model, optimizer, dataloaders, evaluate, tokenizer)


def main() -> None:
    args = parse_args()
    # Make one log on every process with the configuration for debugging.
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    training_function(args)


if __name__ == "__main__":
    main()
