# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How fast ranks are while cases take their turns.

A profile is measured once, before the cases, which are measured for many minutes after it. On a machine that others
use, too, its speed changes meanwhile, within seconds, and a rank that was slow while it was profiled need not be slow
afterwards. So before and after each turn of a case the ranks train a sample, which does not count, and a micro-batch
of a plain model, of a size that cases train, without sending anything, and the case is predicted for the
speed that this shows: what is compared is then what communication and sharding cost, not how the machine's speed
changed. Nothing of a case's own steps is used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple


if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import Dataset


class CheckedRank(NamedTuple):
    """What one check showed of one rank.

    Args:
        seconds: of forward and backward.
        optimizer_seconds: of the optimizer's step, None: it was not taken.
        cpu_seconds: of forward and backward, of all threads.
    """

    seconds: float
    optimizer_seconds: float | None
    cpu_seconds: float


#: One of all ranks.
Check = Sequence[CheckedRank]


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

        self.size = size
        self._model = model
        self._optimizer = optimizer
        self._sample, self._batch = (next(iter(DataLoader(samples, batch_size=size))) for size in (1, size))
        self.run()  # the first one makes gradients and the optimizer's state

    def run(self) -> CheckedRank:
        """A micro-batch.

        A sample goes first: what came first after a case's steps took up to half as long again as what followed.
        """
        self._model(**self._sample).loss.backward()
        self._model.zero_grad()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        self._model(**self._batch).loss.backward()
        computed, cpu_seconds, stepped = time.perf_counter(), time.process_time() - cpu_begun, None
        if self._optimizer is not None:
            self._optimizer.step()
            stepped = time.perf_counter() - computed
        self._model.zero_grad()
        return CheckedRank(computed - begun, stepped, cpu_seconds)


@dataclass(frozen=True)
class Speed:
    """What checks showed of each rank.

    Args:
        slowdowns: seconds of a micro-batch over those of the profile.
        optimizer_seconds: of an optimizer step; 0 where it was not taken.
        cores: CPU seconds per second that it got while all of them computed; 0: not known.
    """

    slowdowns: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]
    cores: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        """Of the machine: the mean over ranks."""
        return mean(self.slowdowns)


def speed_of(
    checks: Sequence[Check], among: Sequence[Check], expected: Sequence[float], nodes: Sequence[int]
) -> Speed:
    """While a case took its turns: medians.

    A case has few checks. How much slower than profiled each rank is shows in those of all cases; how fast the machine
    was during the turns of this one, in its own, of all ranks together: all nodes are emulated on one machine.

    Args:
        checks: those of the case.
        among: those of all cases in the same processes on the same network, these included.
        expected: seconds of each rank's micro-batch, as profiled.
        nodes: ranks on each node, which share its processors as chance has it: for the optimizer each takes their
            mean.
    """
    own, of_all = list(zip(*checks, strict=True)), list(zip(*among, strict=True))  # by rank
    usual = [median(check.seconds for check in rank) for rank in of_all]
    machine = mean(median(check.seconds for check in rank) / usually for rank, usually in zip(own, usual, strict=True))
    slowdowns = tuple(machine * seconds / profiled for seconds, profiled in zip(usual, expected, strict=True))
    steps = iter(
        median([check.optimizer_seconds for check in rank if check.optimizer_seconds is not None] or [0.0])
        for rank in own
    )
    optimizer = tuple(seconds for count in nodes for seconds in [mean(islice(steps, count))] * count)
    cores = tuple(median(check.cpu_seconds / check.seconds for check in rank) for rank in of_all)
    return Speed(slowdowns, optimizer, cores)
