# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Train an OPT language model with LSHDP.

By default it trains a small OPT on the source code of Python's standard library, which needs no download:

    accelerate launch --config_file accelerate_configs/cpu_1x2.yaml \
        recipes/opt_causal_lm.py --plan plan.json --output_dir outputs/opt

Fine-tune a real one with `--model_name_or_path facebook/opt-125m`, or train one of that size from scratch with
`--model_config opt-125m`. Other text: `--dataset_name wikitext --dataset_config_name wikitext-2-raw-v1`, or
`--train_file FILE` (.txt, .json or .csv).

This file has the model. `causal_lm.py` loads and cuts the text, `training_loop.py` trains.
"""

from __future__ import annotations

import argparse
import logging

from causal_lm import parse_causal_lm_args, profiled_causal_lm, train_causal_lm
from datasets import DatasetDict
from embedded_data import byte_level_tokenizer
from hub import load_text_model
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from accelerate_lshdp.profiling import Subject


def sizes(layers: int, heads: int, width: int, positions: int = 2048, **others) -> dict:
    """The keywords of a configuration."""
    named = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width, "ffn_dim": 4 * width}
    # No dropout: then two runs with different plans draw the same loss curve, and can be laid over each other.
    return {**named, "max_position_embeddings": positions, "dropout": 0.0, **others}


MODEL_CONFIGS = {
    "small": sizes(4, 4, 128, positions=256),
    "opt-125m": sizes(12, 12, 768),
    # The only one with embeddings that are narrower than its layers, and with norms behind its layers.
    "opt-350m": sizes(24, 16, 1024, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": sizes(24, 32, 2048),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return parse_causal_lm_args(argv, "an OPT", MODEL_CONFIGS, example="facebook/opt-125m")


def build_model(args: argparse.Namespace, dataset: DatasetDict):
    """The model and its tokenizer."""
    if args.model_name_or_path is not None:
        return load_text_model(args.model_name_or_path, AutoModelForCausalLM)
    tokenizer = byte_level_tokenizer(dataset["train"]["text"])
    config = OPTConfig(
        **MODEL_CONFIGS[args.model_config or "small"],
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # Blocks need no padding. OPT's own padding token, 1, is an ordinary one here, and its embedding would stay 0.
        pad_token_id=None,
    )
    return OPTForCausalLM(config), tokenizer


def profiling_subject(argv: list[str]) -> Subject:
    """What `accelerate-lshdp profile` measures: model, data and optimizer of a training with these arguments."""
    return profiled_causal_lm(parse_args(argv), build_model)


def training_function(args: argparse.Namespace) -> None:
    train_causal_lm(args, build_model, "opt_causal_lm")


def main() -> None:
    args = parse_args()
    # Make one log on every process with the configuration for debugging.
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    training_function(args)


if __name__ == "__main__":
    main()
