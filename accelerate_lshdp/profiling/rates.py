# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`measure_rates`: roughly how fast a device computes and reads its memory, in a fraction of a second.

For a first placement of a model that nobody has profiled. All ranks measure at the same time, so that ranks of one
node share its processors as they do in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


#: Rows and columns of the matrices that are multiplied; entries of the vectors that are added.
_SIDE, _ENTRIES = 512, 2**22
_REPEATS = 5
#: Bytes of memory that AdamW in fp32 reads and writes for each parameter: reads it, its gradient and two moments, and
#: writes all but the gradient.
_OPTIMIZER_BYTES = 28


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank.

    Args:
        flops: operations a second of a product of matrices; a multiplication and an addition are two.
        bytes_per_second: that an addition of long vectors reads and writes.
    """

    flops: float
    bytes_per_second: float

    def optimizer_seconds(self, parameters: int) -> float:
        """Seconds of a step of AdamW on so many parameters, which memory bounds."""
        return parameters * _OPTIMIZER_BYTES / self.bytes_per_second


def measure_rates(
    device: torch.device, dtype: torch.dtype = torch.float32, *, clock: Callable[[], float] = time.perf_counter
) -> Rates:
    """Measures this rank's rates.

    Args:
        device: that trains.
        dtype: in which it multiplies.
        clock: seconds, monotonic.
    """
    matrix = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    one, other = torch.zeros(2, _ENTRIES, device=device)
    multiply = _seconds(lambda: matrix @ matrix, device, clock)
    add = _seconds(lambda: one.add_(other), device, clock)
    return Rates(2 * _SIDE**3 / multiply, 3 * one.nbytes / add)


def _seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        before = clock()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        times.append(clock() - before)
    # The first one starts threads and chooses kernels.
    return max(median(times[1:]), 1e-9)
