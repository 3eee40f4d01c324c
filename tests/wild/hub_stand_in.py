# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Answers Hub names of data sets, metrics and timm's image models with tiny local ones, inside a script's process.

Models, tokenizers and image processors need no code here: `tiny_models` writes them into a Hub cache, where the
libraries find them by themselves. A name that the suite does not know is an error, never a download.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def answer_data_sets() -> None:
    """Makes ``datasets.load_dataset`` read a data set of the suite when it is called with a Hub name."""
    import datasets
    import datasets.load

    load = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *args: Any, split: str | None = None, **kwargs: Any) -> Any:
        if kwargs.get("data_files") or Path(path).exists():
            kwargs.pop("trust_remote_code", None)
            return load(path, name, *args, split=split, **kwargs)
        folder = (
            Path(os.environ["WILD_HUB"]) / "data" / "--".join([path.replace("/", "--"), *([name] if name else [])])
        )
        if not folder.is_dir():
            raise FileNotFoundError(f"the suite has no data set {path!r} {name!r}; add it to tiny_data.py")
        wanted = int(os.environ.get("WILD_SAMPLES", "0"))
        data = datasets.load_from_disk(str(folder))
        if wanted:
            data["train"] = data["train"].select(range(min(wanted, len(data["train"]))))
        if kwargs.get("streaming"):
            data = datasets.IterableDatasetDict({part: rows.to_iterable_dataset() for part, rows in data.items()})
        return data if split is None else data[split]

    datasets.load_dataset = datasets.load.load_dataset = load_dataset


class CountingMetric:
    """A metric that only counts what it was given: the suite compares training, not scores."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._count = 0

    def add_batch(self, *, predictions: Any, references: Any, **_: Any) -> None:
        self._count += len(references)

    def compute(self, *, predictions: Any = None, references: Any = None, **_: Any) -> dict[str, Any]:
        count = self._count + (0 if references is None else len(references))
        self._count = 0
        # The names under which scripts look results up.
        scores = ("accuracy", "f1", "overall_precision", "overall_recall", "overall_f1", "overall_accuracy", "score")
        return {"samples": count, "exact_match": 0.0, **dict.fromkeys(scores, 0.0)}


def answer_metrics() -> None:
    """Makes ``evaluate.load`` return a metric that needs no download."""
    import evaluate

    evaluate.load = lambda path, *args, **kwargs: CountingMetric(path)


def answer_image_models() -> None:
    """Makes ``timm.create_model`` build timm's smallest residual network, without weights from the Hub."""
    import timm
    import timm.models

    create = timm.create_model

    def create_model(model_name: str, pretrained: bool = False, **kwargs: Any) -> Any:
        return create("test_resnet", pretrained=False, **kwargs)

    timm.create_model = timm.models.create_model = create_model


def name_retired_device() -> None:
    """Gives accelerate's list of devices back a name that scripts older than it compare with."""
    from accelerate import DistributedType

    if not hasattr(DistributedType, "TPU"):
        DistributedType.TPU = "TPU"


def declare_image_operators() -> None:
    """Declares the operators without which a torchvision built for another device cannot be imported.

    No script of the suite calls them; of torchvision they use the transforms, which are written in Python.
    """
    import importlib.util

    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    global _operators  # a library that is collected takes its declarations away
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
