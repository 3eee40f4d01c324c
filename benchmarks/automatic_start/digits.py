# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Model, data and optimizer of the scripts beside this file, and how they write down what they did."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification, set_seed


LEARNING_RATE = 1e-4
# The gradient of a key bias is zero but for rounding. With Adam's usual 1e-8 the optimizer makes steps of that noise,
# which no two exact runs share.
ADAM_EPS = 1e-6
IMAGE_SIZE = 32


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Of all scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, required=True, help="on each device")
    parser.add_argument("--max_steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--output_dir", type=Path, required=True)
    return parser.parse_args(argv)


def make_model(layers: int) -> ViTForImageClassification:
    """The same weights in every process."""
    set_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": layers, "num_attention_heads": 6, "intermediate_size": 768}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ViTConfig(image_size=IMAGE_SIZE, patch_size=4, num_channels=1, num_labels=10, **sizes, **drops)
    return ViTForImageClassification(config)


def make_dataset() -> list[dict[str, torch.Tensor]]:
    """scikit-learn's handwritten digits, enlarged."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = torch.nn.functional.interpolate(images, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")
    return [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images, torch.tensor(digits.target), strict=True)
    ]


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)


class Log:
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self) -> None:
        self.ends.append(time.perf_counter())

    def save(self, folder: Path) -> None:
        """Writes the seconds of each step but the first."""
        seconds = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        (folder / "seconds.json").write_text(json.dumps(seconds))
