# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The images of the quickstart: handwritten digits that are part of scikit-learn, so nothing is downloaded."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset


IMAGE_SIZE = 32
HELD_OUT = 297


class DigitImages(Dataset):
    """Labelled images in memory.

    Args:
        images: float32, shape (samples, 1, height, width), from -1 to 1.
        labels: int64, shape (samples,).
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def load_digit_images() -> tuple[DigitImages, DigitImages]:
    """scikit-learn's `load_digits` (UCI "Optical Recognition of Handwritten Digits"), enlarged to 32 x 32 pixels.

    Returns:
        1,500 images to train on and 297 held out, the same in every run and on every rank.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    ink = torch.tensor(digits.images, dtype=torch.float32)[:, None]  # 8 x 8, from 0 to 16
    size = (IMAGE_SIZE, IMAGE_SIZE)
    images = torch.nn.functional.interpolate(ink / 8 - 1, size=size, mode="bilinear", align_corners=False)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    # The file is ordered by writer: without a permutation the last writers alone would be held out.
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    return DigitImages(images[train], labels[train]), DigitImages(images[held_out], labels[held_out])
