# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""CPU seconds that sending and adding gradients takes of a rank, measured and fitted to a `CommunicationCost`.

CPU seconds do not depend on the speed of the network, on other processes of the machine, or on a quota.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from accelerate_lshdp.documents.network import Collective, ring_all_reduce
from accelerate_lshdp.engine.wire.reduction import GradientReduction
from accelerate_lshdp.planning.cost.cluster_model import CommunicationCost


#: Bytes of gradients: small buffers show the fixed cost of a collective, large ones the cost of a byte.
SIZES = (65_536, 8_388_608)
_REPEATS = 40


def reduction_cpu_seconds(
    reduction: GradientReduction,
    sizes: Sequence[int] = SIZES,
    repeats: int = _REPEATS,
    clock: Callable[[], float] = time.process_time,
) -> list[tuple[int, float]]:
    """(bytes of gradients, mean CPU seconds of this process) of one reduction of each size, in fp32.

    All ranks of the reduction's group must call it at the same time. All threads of the process are counted, so
    nothing else should run in it.

    Args:
        reduction: the reduction to measure.
        sizes: bytes of gradients of each buffer.
        repeats: number of reductions of each size.
        clock: CPU seconds of this process.
    """
    # The mean, not the median: CPU clocks charge many reductions of 64 KB with 1 ms and many others with 5. Of 16
    # series of 40 in fp32, the standard deviation of the means was 11 %, that of the medians 50 %.
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
    """The cost of communication on one core, from the CPU seconds of two sizes.

    Args:
        exact: (bytes, CPU seconds) of reductions in fp32; the smallest and the largest size count.
        nodes: ranks on each node of the reduction's group.
        lossy: (bytes of fp32, CPU seconds) in another format. The seconds of a byte beyond those of sending it are
            conversion.
        wire_share: bytes on the wire of that format for each byte of fp32.
        collective: the exchange that the reduction of `exact` makes.

    Raises:
        ValueError: fewer than two sizes.
    """
    per_byte, fixed = _line(exact)
    conversion = 0.0
    if lossy is not None:
        lossy_per_byte, fixed = _line(lossy)
        conversion = max(0.0, lossy_per_byte - wire_share * per_byte)
    # The busiest node's bytes for one byte of payload, divided by its ranks.
    handled = max(collective(1.0, nodes).handled_bytes) / max(nodes)  # by one rank
    return CommunicationCost(per_byte / handled if handled else 0.0, fixed, conversion)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The line through the smallest and the largest size: (seconds per byte, seconds at 0 bytes), neither negative."""
    (small, first), (large, second) = min(points), max(points)
    if small == large:
        raise ValueError(f"found CPU seconds of {len(points)} sizes, expected those of at least two different sizes")
    slope = max(0.0, (second - first) / (large - small))
    return slope, max(0.0, first - slope * small)
