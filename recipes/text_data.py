# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Text for language models: from the Hub, from files or embedded, and cut into blocks of tokens."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from dataset_splits import with_columns, with_held_out
from datasets import ClassLabel, DatasetDict, Value, load_dataset
from embedded_data import fingerprint, standard_library_dataset, standard_library_pieces
from hub import from_the_hub
from training_arguments import positive_int

from accelerate_lshdp import LSHDPAccelerator


DEFAULT_BLOCK_SIZE = 128
TEXT_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}
HELD_OUT_SHARE = 0.05


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which text is trained on."""
    parser.add_argument("--dataset_name", help="A dataset of the Hub. Default: the standard library's source code.")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--train_file", help="Training text: .txt (a line a row), .json, .jsonl or .csv.")
    parser.add_argument("--validation_file", help="The same for evaluation. Default: 5 %% of the training rows.")
    parser.add_argument("--text_column", help="Default: 'text', else the first column.")
    parser.add_argument(
        "--block_size",
        type=positive_int,
        help=f"Tokens in a sample. Default: {DEFAULT_BLOCK_SIZE}, or what the model takes if that is less.",
    )


def check_text_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a message if the options of text contradict each other."""
    if args.dataset_name is not None and args.train_file is not None:
        parser.error("--dataset_name and --train_file both say where the text is: give one of them.")
    if args.validation_file is not None and args.train_file is None:
        parser.error("--validation_file needs --train_file.")
    for file in (args.train_file, args.validation_file):
        if file is not None and Path(file).suffix not in TEXT_FORMATS:
            parser.error(f"{file}: expected a file name that ends in {', '.join(TEXT_FORMATS)}.")


def load_text(args: argparse.Namespace) -> DatasetDict:
    """Splits `train` and `validation` with a column `text`."""
    dataset = _load_named(args)
    if dataset is None:
        return standard_library_dataset()
    columns = dataset["train"].column_names
    column = args.text_column or ("text" if "text" in columns else columns[0])
    if column not in columns:
        raise ValueError(f"No column {column!r} among {columns}. Name the one with the text in --text_column.")
    return with_held_out(with_columns(dataset, text=column), HELD_OUT_SHARE)


def load_labelled_text(args: argparse.Namespace) -> DatasetDict:
    """Splits `train` and `validation` with columns `text` and `label`, a `ClassLabel`."""
    dataset = _load_named(args)
    if dataset is None:
        return standard_library_pieces()
    features = dataset["train"].features
    classes = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
    label = args.label_column or next(iter(["label"] if "label" in features else classes), None)
    strings = [name for name, kind in features.items() if kind == Value("string") and name != label]
    text = args.text_column or next(iter(["text"] if "text" in features else strings), None)
    for column, option in [(text, "text"), (label, "label")]:
        if column not in features:
            raise ValueError(
                f"No {option} column ({column or 'none found'}) among the columns {dict(features)}. Name it with "
                f"--{option}_column; a .txt file has no labels."
            )
    dataset = with_held_out(with_columns(dataset, text=text, label=label), HELD_OUT_SHARE)
    if not isinstance(features[label], ClassLabel):
        # Through strings, for whole numbers that do not begin with 0.
        names = sorted({str(value) for value in dataset["train"]["label"]})
        dataset = dataset.cast_column("label", Value("string")).cast_column("label", ClassLabel(names=names))
    return dataset


def _load_named(args: argparse.Namespace) -> DatasetDict | None:
    """What `--dataset_name` or `--train_file` names; None: neither was given, so the embedded text is meant."""
    if args.dataset_name is not None:
        with from_the_hub(
            f"the dataset {args.dataset_name}",
            "leave --dataset_name out to train on the embedded text, or give a file with --train_file",
        ):
            return load_dataset(args.dataset_name, args.dataset_config_name)
    if args.train_file is not None:
        data_files = {"train": args.train_file}
        if args.validation_file is not None:
            data_files["validation"] = args.validation_file
        return load_dataset(TEXT_FORMATS[Path(args.train_file).suffix], data_files=data_files)
    return None


def choose_block_size(args: argparse.Namespace, model) -> int:
    """Tokens in a sample: what the user asked for, if the model has so many positions."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if args.block_size is None:
        return min(DEFAULT_BLOCK_SIZE, longest or DEFAULT_BLOCK_SIZE)
    if longest is not None and args.block_size > longest:
        raise ValueError(f"--block_size {args.block_size} is longer than the model's {longest} positions. Lower it.")
    return args.block_size


def group_into_blocks(
    dataset: DatasetDict,
    tokenizer,
    block_size: int,
    separator: int,
    first: Sequence[int] = (),
    last: Sequence[int] = (),
) -> DatasetDict:
    """Tokenize, join the documents with a token between them, and cut into blocks (`input_ids`) of one length.

    The remainder, shorter than a block, is dropped once a split (once every 1,000 rows of a longer one).

    Args:
        dataset: splits with a column `text`.
        tokenizer: of the model.
        block_size: tokens in a block.
        separator: the token after each document.
        first: tokens with which every block begins.
        last: tokens with which every block ends.
    """
    length = block_size - len(first) - len(last)
    if length < 1:
        raise ValueError(f"--block_size {block_size} has no room for text. Raise it.")

    def tokenize_and_group(examples):
        documents = tokenizer(examples["text"], add_special_tokens=False, verbose=False)["input_ids"]
        ids = list(chain.from_iterable([*document, separator] for document in documents))
        starts = range(0, len(ids) - length + 1, length)
        return {"input_ids": [[*first, *ids[start : start + length], *last] for start in starts]}

    blocks = dataset.map(tokenize_and_group, batched=True, remove_columns=["text"])
    for split, rows in blocks.items():
        if len(rows) == 0:
            raise ValueError(f"The {split} text is shorter than one block of {block_size} tokens. Lower --block_size.")
    return blocks


def check_same_text(args: argparse.Namespace, accelerator: LSHDPAccelerator, rows: Iterable[list[int]]) -> None:
    """Stop every rank unless all have the same embedded text, which is that of each node's Python.

    Args:
        args: the options of text; with a text of the user's nothing is compared.
        accelerator: of this rank.
        rows: the tokens that it trains on.
    """
    if args.dataset_name is not None or args.train_file is not None:
        return
    here = torch.tensor([fingerprint(rows)], device=accelerator.device)
    if len(set(accelerator.gather(here).tolist())) > 1:
        raise RuntimeError(
            "The embedded text is the source code of Python's standard library, and the nodes have different ones. "
            "Use the same version of Python everywhere, or give the text with --train_file."
        )
