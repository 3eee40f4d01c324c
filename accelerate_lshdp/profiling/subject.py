# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`Subject`: the model, data and optimizer that are profiled; `Samples`: micro-batches of any size from the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


def output_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss in the output of ``model(**batch)``, as transformers models compute it when they are given labels.

    Raises:
        TypeError: the batch is no mapping, or the model's output has no loss.
    """
    advice = "give Subject a loss=lambda model, batch: ..."
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"found a batch that is a {type(batch).__name__}, expected a mapping for model(**batch): {advice}"
        )
    output = model(**batch)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise TypeError(f"found a model output of type {type(output).__name__} without a loss: {advice}")
    return loss


@dataclass(frozen=True)
class Subject:
    """A user's model, data and optimizer before ``accelerator.prepare``.

    Args:
        model: in host memory, not prepared. It cannot be used afterwards: its parameters are sharded and changed.
        train_dataloader: its data set and ``collate_fn`` make the micro-batches; neither its ``batch_size`` nor the
            order of its sampler matters.
        optimizer: the optimizer of the model's parameters, before its first step.
        loss: computes the loss of a micro-batch (as ``collate_fn`` returns it, on the device).
    """

    model: nn.Module
    train_dataloader: DataLoader
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], torch.Tensor] = output_loss


class Samples:
    """The first samples of a loader's data set, read when they are needed and then kept.

    Raises:
        ValueError: the loader does not batch samples itself.
    """

    def __init__(self, loader: DataLoader) -> None:
        # A prepared loader's own batching is replaced, but the data set's is not.
        if loader.batch_size is None and loader.batch_sampler is None:
            raise ValueError(
                "found a loader with batch_size=None, whose data set makes batches itself; expected one that batches "
                "samples: micro-batches of other sizes are needed"
            )
        self._collate = loader.collate_fn
        self._unread = _in_order(loader.dataset)
        self._read: list[Any] = []

    def available(self, wanted: int) -> int:
        """``wanted``, or the number of samples in the data set if there are fewer."""
        while len(self._read) < wanted:
            try:
                self._read.append(next(self._unread))
            except StopIteration:
                return len(self._read)
        return wanted

    def batch(self, size: int) -> Any:
        """The first ``size`` samples, collated. Raises ValueError if there are fewer."""
        if self.available(size) < size:
            raise ValueError(f"found {len(self._read)} samples in the data set, expected {size}")
        return self._collate(self._read[:size])

    def repeated(self, size: int, times: int) -> Any:
        """The first ``size`` samples, each ``times`` times, collated: as long, if padded, as without repeating."""
        if self.available(size) < size:
            raise ValueError(f"found {len(self._read)} samples in the data set, expected {size}")
        return self._collate(self._read[:size] * times)


def _in_order(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        yield from dataset
    else:
        for index in range(len(dataset)):
            yield dataset[index]


def copy_container(batch: Any) -> Any:
    """A shallow copy of a batch's container, as user code may remove entries (``batch.pop("labels")``)."""
    return copy.copy(batch) if isinstance(batch, (MutableMapping, list)) else batch
