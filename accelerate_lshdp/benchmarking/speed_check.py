# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How fast ranks are while cases take their turns.

A profile is measured once, before the cases, which are measured for many minutes after it. On a machine that others
use, too, its speed changes meanwhile, within seconds. So before and after each turn of a case the ranks train some
micro-batches of a plain model, of the size that the plan gives them, without sending anything, and the case is
predicted for the speed that this shows: what is compared is then what communication and sharding cost, not how the
machine's speed changed. Nothing of a case's own steps is used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import Dataset


class SpeedCheck:
    """One rank's part.

    Args:
        model: plain, in training mode.
        optimizer: of its parameters, None: steps are not taken.
        samples: the data set.
        size: of its micro-batches.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, samples: Dataset, size: int) -> None:
        from torch.utils.data import DataLoader  # whoever only reads speeds does not wait for torch

        self._model = model
        self._optimizer = optimizer
        self._batch = next(iter(DataLoader(samples, batch_size=size)))
        self.run()  # the first one makes gradients and the optimizer's state

    def run(self) -> tuple[float, float | None]:
        """Wall seconds of forward and backward and, if it was taken, of the optimizer's step."""
        begun = time.perf_counter()
        self._model(**self._batch).loss.backward()
        computed, stepped = time.perf_counter(), None
        if self._optimizer is not None:
            self._optimizer.step()
            stepped = time.perf_counter() - computed
        self._model.zero_grad()
        return computed - begun, stepped


@dataclass(frozen=True)
class Speed:
    """What checks showed.

    Args:
        slowdown: seconds of a micro-batch over those of the profile, the mean over ranks: all nodes are emulated on
            one machine, whose speed it is.
        optimizer_seconds: of each rank's optimizer step; 0 where it was not taken.
    """

    slowdown: float
    optimizer_seconds: tuple[float, ...]


def speed_of(
    checks: Sequence[Sequence[tuple[float, float | None]]], expected: Sequence[float], nodes: Sequence[int]
) -> Speed:
    """From what the ranks told in several checks: medians.

    Args:
        checks: of each check, what each rank's `SpeedCheck.run` returned.
        expected: seconds of each rank's micro-batch, as profiled.
        nodes: ranks on each node, which share its processors as chance has it: each takes their mean.
    """
    slowdowns, optimizer = [], []
    for rank, seconds in enumerate(expected):
        steps = [check[rank] for check in checks]
        slowdowns.append(median(computed for computed, _ in steps) / seconds)
        optimizer.append(median([stepped for _, stepped in steps if stepped is not None] or [0.0]))
    left = iter(optimizer)
    of_ranks = tuple(seconds for count in nodes for seconds in [mean(islice(left, count))] * count)
    return Speed(mean(slowdowns), of_ranks)
