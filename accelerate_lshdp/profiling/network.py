# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Measured message times between nodes: a ping-pong and an all-reduce sweep, fitted to latency + bytes * cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.profile_sections import MessageTimes, Network
from accelerate_lshdp.profiling.line_fit import fit_line
from accelerate_lshdp.runtime.groups import temporary_group
from accelerate_lshdp.runtime.topology import Topology


#: Bytes. Small ones show the latency, large ones the bandwidth.
PING_PONG_SIZES = (64, 65_536, 1_048_576)
SMALLEST_ALL_REDUCE = 1024
_GROWTH = 8
#: Bytes up to which messages of all sizes take about as long.
_MOSTLY_LATENCY = 65_536
_MOST_REPEATS = 10


def fit_message_times(points: Iterable[tuple[int, float]]) -> MessageTimes:
    """The line through measured (bytes, seconds), by relative errors: small messages decide the latency (`fit_line`).

    Raises:
        ValueError: there are no points.
    """
    points = tuple(points)
    return MessageTimes(*fit_line(points), points)


def all_reduce_sizes(largest: int) -> list[int]:
    """Sizes of the all-reduce sweep in bytes: from 1 KB by factors of 8 up to ``largest`` (a multiple of 4)."""
    sizes, size = [], SMALLEST_ALL_REDUCE
    while size < largest:
        sizes.append(size)
        size *= _GROWTH
    return [*sizes, max(largest // 4 * 4, SMALLEST_ALL_REDUCE)]


def measure_network(
    topology: Topology,
    device: torch.device,
    bucket_bytes: Sequence[int],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[float], None] = lambda spent: None,
) -> Network:
    """Measures on all ranks together (collective); the same result on all of them.

    A size is measured several times while that takes not more than ``seconds`` in all; large ones that would exceed it
    even once are left out. Each time is the median of its repeats on a rank, and the largest one of all ranks.

    Args:
        topology: at least two ranks. The ping-pong is between rank 0 and the first rank of the second node, or
            rank 1 where there is one node.
        device: the device of the gradients.
        bucket_bytes: bytes of the gradient buckets; the sweep ends at the largest.
        seconds: seconds that all of it may take.
    """
    partner = topology.node_groups[1][0] if topology.num_nodes > 1 else 1
    sweep = _Sweep(topology.rank, device, clock, on_progress)
    sizes = all_reduce_sizes(max(bucket_bytes, default=0))
    ping_pong = sweep.run(lambda buffer: _ping_pong(buffer, topology.rank, partner), PING_PONG_SIZES, 0.2 * seconds)
    all_reduce = sweep.run(dist.all_reduce, sizes, 0.6 * seconds)
    inside = None
    if max(topology.node_sizes) > 1:
        with temporary_group(topology.node_groups) as group:
            measured = sweep.run(lambda buffer: dist.all_reduce(buffer, group=group), sizes, 0.2 * seconds)
        inside = fit_message_times(measured)
    one_way = [(size, both_ways / 2) for size, both_ways in ping_pong]
    return Network(fit_message_times(one_way), fit_message_times(all_reduce), inside)


def _ping_pong(buffer: torch.Tensor, rank: int, partner: int) -> None:
    if rank == 0:
        dist.send(buffer, partner)
        dist.recv(buffer, partner)
    elif rank == partner:
        dist.recv(buffer, 0)
        dist.send(buffer, 0)


class _Sweep:
    """Measures one kind of exchange at growing sizes; all ranks decide alike, from times that were exchanged."""

    def __init__(
        self, rank: int, device: torch.device, clock: Callable[[], float], on_progress: Callable[[float], None]
    ) -> None:
        self._rank = rank
        self._device = device
        self._clock = clock
        self._on_progress = on_progress
        self._spent = 0.0

    def run(
        self, exchange: Callable[[torch.Tensor], object], sizes: Sequence[int], seconds: float
    ) -> list[tuple[int, float]]:
        """(bytes, seconds) of each size that there was time for; the smallest is always measured.

        Args:
            exchange: the collective, called with a float32 buffer.
            sizes: bytes, increasing.
            seconds: seconds that all sizes may take.
        """
        spent, points = 0.0, []
        for size in sizes:
            affordable = _MOST_REPEATS
            if points:
                # Time is predicted in proportion to the bytes beyond those that the latency hides.
                known_size, known_seconds = points[-1]
                expected = known_seconds * size / max(known_size, min(size, _MOSTLY_LATENCY))
                affordable = int((seconds - spent) / expected)
            if affordable < 1:
                break
            buffer = torch.zeros(max(1, size // 4), device=self._device)
            # The first exchange sets up connections, and counts only if there is no time for a second one.
            times = [self._time(exchange, buffer) for _ in range(max(1, min(affordable, _MOST_REPEATS)))]
            own = median(times[1:] or times)
            # The slowest rank's time counts, and every rank has to know it: the next size is decided from it.
            everyone: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
            dist.all_gather_object(everyone, (own, sum(times)))
            points.append((buffer.numel() * 4, max(time_of_rank for time_of_rank, _ in everyone)))
            took = max(sum_of_rank for _, sum_of_rank in everyone)
            spent += took
            self._spent += took
            self._on_progress(self._spent)
        return points

    def _time(self, exchange: Callable[[torch.Tensor], object], buffer: torch.Tensor) -> float:
        self._synchronise()
        before = self._clock()
        exchange(buffer)
        self._synchronise()
        return self._clock() - before

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
