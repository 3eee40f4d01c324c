# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How many labels the samples of a batch have, by every way that losses count them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


#: Labels that losses leave out, as of padding.
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """The labels of some samples; those of repeated samples do not count."""

    samples: int = 0
    labels: int = 0
    """Other than -100."""
    shifted: int = 0
    """Without the first of each row, which nothing predicts in a causal language model."""
    ignored: int = 0
    """-100."""

    @classmethod
    def of(cls, labels: torch.Tensor, samples: int) -> LabelCounts:
        if samples == 0:
            return cls()
        kept = labels.ne(IGNORED_LABEL)
        count = int(kept.sum())
        shifted = int(kept[..., 1:].sum()) if labels.ndim > 1 else count
        return cls(samples, count, shifted, kept.numel() - count)

    def __add__(self, other: LabelCounts) -> LabelCounts:
        pairs = zip(self.as_tuple(), other.as_tuple(), strict=True)
        return LabelCounts(*(one + another for one, another in pairs))

    def as_tuple(self) -> tuple[int, int, int, int]:
        return self.samples, self.labels, self.shifted, self.ignored


@dataclass(frozen=True, slots=True)
class BatchLabels:
    """The integer labels of a micro-batch, and of those of this rank that it is counted with."""

    values: torch.Tensor
    """On the host."""
    own: LabelCounts
    together: tuple[LabelCounts, ...]
    """Of each micro-batch of this rank's part of the global batch, or of the optimizer step."""
