# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How fast ranks are while cases take their turns.

A profile is measured once, before the cases, which are measured for many minutes after it. On a machine that others
use, too, its speed changes meanwhile. So in every round each rank trains some micro-batches of a plain model, of the
size that the plan gives it, without sending anything, and predictions are made for the speed that this shows:
what they tell is then what communication and sharding cost, not how the machine's speed changed. Nothing of a case's
own steps is used.
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


#: Of a check; the first one does not count.
STEPS = 3


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

    def run(self) -> list[tuple[float, float]]:
        """Wall seconds of forward and backward and of the optimizer's step, of each counted step."""
        return [self._step() for _ in range(STEPS)][1:]

    def _step(self) -> tuple[float, float]:
        begun = time.perf_counter()
        self._model(**self._batch).loss.backward()
        computed = time.perf_counter()
        if self._optimizer is not None:
            self._optimizer.step()
        self._model.zero_grad()
        return computed - begun, time.perf_counter() - computed


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
    checks: Sequence[Sequence[Sequence[tuple[float, float]]]], expected: Sequence[float], nodes: Sequence[int]
) -> Speed:
    """From what the ranks told in several checks: medians over all steps.

    Args:
        checks: of each check, what each rank's `SpeedCheck.run` returned.
        expected: seconds of each rank's micro-batch, as profiled.
        nodes: ranks on each node, which share its processors as chance has it: each takes their mean.
    """
    slowdowns, optimizer = [], []
    for rank, seconds in enumerate(expected):
        steps = [step for check in checks for step in check[rank]]
        slowdowns.append(median(computed for computed, _ in steps) / seconds)
        optimizer.append(median(stepped for _, stepped in steps))
    left = iter(optimizer)
    of_ranks = tuple(seconds for count in nodes for seconds in [mean(islice(left, count))] * count)
    return Speed(mean(slowdowns), of_ranks)
