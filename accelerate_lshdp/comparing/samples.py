# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Real data that needs no download: handwritten digits as images, Python's standard library as text.

The samples are in one fixed order, and global batch t is the same slice of it for every strategy: losses of two cases
can be laid over each other.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


#: One plain file each in every Python since 3.10.
_TEXT_MODULES = "argparse ast calendar configparser dataclasses inspect mailbox pickle tarfile turtle typing".split()


class DigitImages(Dataset):
    """scikit-learn's `load_digits` (UCI "Optical Recognition of Handwritten Digits"), enlarged when they are read.

    Args:
        order: a permutation of the 1,797 digits.
        size: height and width in pixels.
        channels: copies of the one channel.
    """

    def __init__(self, order: torch.Tensor, size: int, channels: int) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.ink = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1  # 8 x 8, from -1 to 1
        self.labels = torch.tensor(digits.target, dtype=torch.int64)[order]
        self.size = size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """A text that two data sets share if their samples are the same in the same order."""
        return _digest(self.ink, self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = nn.functional.interpolate(self.ink[index : index + 1], size=(self.size, self.size), mode="bilinear")[
            0
        ]
        return {"pixel_values": pixels.expand(self.channels, -1, -1), "labels": self.labels[index]}


class StandardLibraryText(Dataset):
    """Sources of Python's standard library, cut into pieces; a token is a byte.

    Args:
        seed: of the order of the pieces.
        length: tokens of a piece.
    """

    def __init__(self, seed: int, length: int) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        text = b"".join((library / f"{name}.py").read_bytes() for name in _TEXT_MODULES)
        pieces = len(text) // length
        tokens = torch.frombuffer(bytearray(text[: pieces * length]), dtype=torch.uint8).view(pieces, length)
        self.tokens = tokens[_permutation(pieces, seed)]

    def __len__(self) -> int:
        return len(self.tokens)

    def digest(self) -> str:
        """As `DigitImages.digest`: versions of Python differ in their library."""
        return _digest(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index].long()
        return {"input_ids": tokens, "labels": tokens}


def load_samples(model: Mapping[str, Any], seed: int) -> Dataset:
    """The data set for a model (see `build_model`), the same on every rank."""
    if model["kind"] == "vit":
        order = _permutation(1797, seed)
        return DigitImages(order, model.get("image_size", 224), model.get("num_channels", 3))
    return StandardLibraryText(seed, model.get("n_positions", 1024))


def _digest(*tensors: torch.Tensor) -> str:
    return sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def _permutation(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
