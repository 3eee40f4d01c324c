# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What `accelerate-lshdp profile` measures of the scripts beside this file."""

from __future__ import annotations

from digits import make_dataset, make_model, make_optimizer, parse_arguments
from torch.utils.data import DataLoader

from accelerate_lshdp.profiling import Subject


def profiling_subject(argv: list[str]) -> Subject:
    args = parse_arguments(argv)
    model = make_model(args.layers)
    return Subject(model, DataLoader(make_dataset(), batch_size=args.batch_size), make_optimizer(model))
