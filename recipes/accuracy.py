# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Accuracy as an `evaluate.Metric`, for machines that cannot download the Hub's `accuracy`.

`evaluate.load("path/to/recipes/accuracy.py")` works too.
"""

from __future__ import annotations

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """Fraction of predicted class ids that equal the reference; same inputs and result as the Hub's `accuracy`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Fraction of predictions that equal their reference.",
            citation="",
            inputs_description="Args: predictions (list of int), references (list of int).",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        correct = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
        return {"accuracy": correct / len(references)}
