# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Writes the suite's models, data sets and images: ``python build_hub.py FOLDER DTYPE IMAGES``."""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_data
import tiny_models
import torch


if __name__ == "__main__":
    folder, dtype, images = sys.argv[1:]
    tiny_models.write_models(Path(folder) / "hub", getattr(torch, dtype))
    tiny_data.write_data(Path(folder) / "data")
    tiny_data.write_pets(Path(folder) / "pets", int(images))
