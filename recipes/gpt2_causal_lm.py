# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Train a GPT-2 language model with LSHDP.

By default it trains a small GPT-2 on the source code of Python's standard library, which needs no download:

    accelerate launch --config_file accelerate_configs/cpu_1x2.yaml \
        recipes/gpt2_causal_lm.py --plan plan.json --output_dir outputs/gpt2

Fine-tune the real one with `--model_name_or_path gpt2`. Other text: `--dataset_name wikitext
--dataset_config_name wikitext-2-raw-v1`, or `--train_file FILE` (.txt, .json or .csv).

This file has the model. `causal_lm.py` loads and cuts the text, `training_loop.py` trains.
"""

from __future__ import annotations

import argparse
import logging

from causal_lm import parse_causal_lm_args, profiled_causal_lm, train_causal_lm
from datasets import DatasetDict
from embedded_data import byte_level_tokenizer
from hub import load_text_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from accelerate_lshdp.profiling import Subject


# No dropout anywhere: then two runs with different plans draw the same loss curve, and can be laid over each other.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODEL_CONFIGS = {
    "small": {"n_positions": 256, "n_embd": 128, "n_layer": 4, "n_head": 4, **NO_DROPOUT},
    "gpt2": {"n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, **NO_DROPOUT},
    "gpt2-medium": {"n_positions": 1024, "n_embd": 1024, "n_layer": 24, "n_head": 16, **NO_DROPOUT},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return parse_causal_lm_args(argv, "a GPT-2", MODEL_CONFIGS, example="gpt2")


def build_model(args: argparse.Namespace, dataset: DatasetDict):
    """The model and its tokenizer."""
    if args.model_name_or_path is not None:
        return load_text_model(args.model_name_or_path, AutoModelForCausalLM)
    tokenizer = byte_level_tokenizer(dataset["train"]["text"])
    config = GPT2Config(
        **MODEL_CONFIGS[args.model_config or "small"],
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config), tokenizer


def profiling_subject(argv: list[str]) -> Subject:
    """What `accelerate-lshdp profile` measures: model, data and optimizer of a training with these arguments."""
    return profiled_causal_lm(parse_args(argv), build_model)


def training_function(args: argparse.Namespace) -> None:
    train_causal_lm(args, build_model, "gpt2_causal_lm")


def main() -> None:
    args = parse_args()
    # Make one log on every process with the configuration for debugging.
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    training_function(args)


if __name__ == "__main__":
    main()
