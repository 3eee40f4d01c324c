# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What sending and adding gradients takes of a rank's processor, on the clock that counts only its own work.

CPU seconds do not depend on how fast the network is, on who else uses the machine, or on a quota.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from accelerate_lshdp.documents.network import Collective, ring_all_reduce
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.planning.cost.cluster_model import CommunicationCost


#: Bytes of gradients: small ones show what a collective costs, large ones what bytes do.
SIZES = (65_536, 8_388_608)
_REPEATS = 40


def reduction_cpu_seconds(
    reduction: GradientReduction,
    sizes: Sequence[int] = SIZES,
    repeats: int = _REPEATS,
    clock: Callable[[], float] = time.process_time,
) -> list[tuple[int, float]]:
    """(bytes of gradients, mean CPU seconds of this process) of one reduction of each size, in fp32.

    All ranks of the reduction's group call it at the same time. It counts all threads of the process, so nothing else
    should run in it. On this clock many reductions of 64 KB show 1 ms and many others 5: of 16 series of 40 in
    fp32, the standard deviation of the means was 11 %, that of the medians 50 %.
    """
    points = []
    for index, size in enumerate(sizes):
        buffer = torch.zeros(size // 4)
        reduction.start(buffer, index, [buffer.shape]).wait()  # the first one sets up connections
        before = clock()
        for _ in range(repeats):
            reduction.start(buffer, index, [buffer.shape]).wait()
        points.append((buffer.numel() * 4, (clock() - before) / repeats))
    return points


def fit_communication_cost(
    exact: Sequence[tuple[int, float]],
    nodes: Sequence[int],
    lossy: Sequence[tuple[int, float]] | None = None,
    wire_share: float = 1.0,
    collective: Collective = ring_all_reduce,
) -> CommunicationCost:
    """What communication takes of one core, from CPU seconds of two sizes.

    Args:
        exact: (bytes, CPU seconds) of reductions in fp32, the smallest and the largest size count.
        nodes: ranks on each node of the reduction's group.
        lossy: the same in another format: what a byte takes beyond sending it is conversion.
        wire_share: bytes of that format for one of fp32.
        collective: how the reduction of `exact` exchanges.

    Raises:
        ValueError: fewer than two sizes.
    """
    per_byte, fixed = _line(exact)
    conversion = 0.0
    if lossy is not None:
        lossy_per_byte, fixed = _line(lossy)
        conversion = max(0.0, lossy_per_byte - wire_share * per_byte)
    handled = max(collective(1.0, nodes).handled_bytes) / max(nodes)  # by one rank
    return CommunicationCost(per_byte / handled if handled else 0.0, fixed, conversion)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds per byte, and those without bytes; neither is negative."""
    (small, first), (large, second) = min(points), max(points)
    if small == large:
        raise ValueError(f"found CPU seconds of {len(points)} sizes, expected those of at least two different sizes")
    slope = max(0.0, (second - first) / (large - small))
    return slope, max(0.0, first - slope * small)
