# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What classifiers have in common: the names of their classes, and how often they are right."""

from __future__ import annotations

import argparse
from typing import Any

import evaluate
import torch
from accelerate.logging import get_logger
from accuracy import Accuracy
from torch import nn
from torch.utils.data import DataLoader

from accelerate_lshdp import LSHDPAccelerator


logger = get_logger(__name__)


def class_options(labels: list[str]) -> dict[str, Any]:
    """The keywords of a configuration, or of `from_pretrained`, that name the classes of a model."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def load_metric(args: argparse.Namespace) -> evaluate.Metric:
    """The Hub's accuracy, or the same from this folder when the Hub is not reachable or not needed otherwise."""
    if args.dataset_name is None and args.model_name_or_path is None:
        return Accuracy(keep_in_memory=True)
    try:
        return evaluate.load("accuracy", keep_in_memory=True)
    except OSError:
        logger.warning("evaluate's accuracy cannot be loaded from the Hub: using the one in recipes/accuracy.py.")
        return Accuracy(keep_in_memory=True)


def evaluate_classes(
    accelerator: LSHDPAccelerator, model: nn.Module, dataloader: DataLoader, *, metric: evaluate.Metric
) -> dict[str, float]:
    """Accuracy over the held-out samples, each counted once."""
    model.eval()
    for batch in dataloader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        # Gathers from all ranks and drops the samples that were repeated to fill the last batch.
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    return {"accuracy": metric.compute()["accuracy"]}
