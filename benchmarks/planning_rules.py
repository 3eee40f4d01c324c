# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The rules that are compared: each turns a cluster's curves and a global batch into batch sizes.

A rule may ask for any time on the measured curves; `optimal_makespan` says what could have been reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gpu_curves import Curve

from accelerate_lshdp.planning import RankProfile, TimeCurve, plan_fixed_total
from accelerate_lshdp.profiling import probe_sizes


def makespan(curves: Sequence[Curve], batch_sizes: Sequence[int]) -> float:
    """Seconds of the slowest rank."""
    return max(float(curve[size - 1]) for curve, size in zip(curves, batch_sizes, strict=True))


def running_maximum(curves: Sequence[Curve]) -> list[Curve]:
    """The curves without their dips: what the planner takes them for."""
    return [np.maximum.accumulate(curve) for curve in curves]


def optimal_makespan(curves: Sequence[Curve], total: int) -> float:
    """The least makespan of any cut of ``total``, for curves that may fall and rise as they like.

    Bisection over all measured times. Whether a time T suffices is a question of sums: each rank may take any batch
    size whose time is at most T, and the sizes must sum to the total. Bit s of ``reachable`` says whether the ranks so
    far can take s samples. Nothing of the project's planner is used.
    """
    times = np.unique(np.concatenate(curves))
    below, enough = -1, len(times) - 1
    while enough - below > 1:
        middle = (below + enough) // 2
        if _reachable(curves, times[middle]) >> total & 1:
            enough = middle
        else:
            below = middle
    if not _reachable(curves, times[enough]) >> total & 1:
        raise ValueError(f"found a total of {total}, expected {len(curves)} to {sum(map(len, curves))} samples")
    return float(times[enough])


def _reachable(curves: Sequence[Curve], longest: float) -> int:
    reachable = 1
    for curve in curves:
        sums = 0
        for size in np.flatnonzero(curve <= longest) + 1:
            sums |= reachable << int(size)
        reachable = sums
    return reachable


def equal_split(curves: Sequence[Curve], total: int) -> list[int]:
    """The same batch for all, the remainder one each to the first; what a rank cannot hold goes to the others."""
    sizes = [0] * len(curves)
    while left := total - sum(sizes):
        able = [rank for rank, curve in enumerate(curves) if sizes[rank] < len(curve)]
        share, remainder = divmod(left, len(able))
        for place, rank in enumerate(able):
            sizes[rank] = min(sizes[rank] + share + (place < remainder), len(curves[rank]))
    return sizes


def iterative_rule(curves: Sequence[Curve], total: int, most_iterations: int = 10) -> list[int]:
    """The rule of the LSHDP paper, rewritten from its authors' public script (mirzaei2114/LSHDP).

    It starts at one sample a rank and cuts the rest in proportion to the ranks' maxima. Then it measures all ranks and
    adds to each its share of the inverse times less the mean share, times the total and a step length of 1, 1, 1/2,
    1/3, ...; all changes are scaled by one factor, so that the rank that would leave 1 to its maximum by most stays
    inside. It ends when nothing changes, or after 10 measurements. Every batch is rounded by itself, so the sum need
    not be the total. One thing is ours: a batch beyond a rank's maximum, where the script would fail, is cut to it.
    """
    largest = np.array([len(curve) for curve in curves], dtype=float)
    sizes = np.clip(np.round(1 + largest / largest.sum() * (total - len(curves))), 1, largest)
    for iteration in range(most_iterations):
        speeds = 1 / np.array([curve[int(size) - 1] for curve, size in zip(curves, sizes, strict=True)])
        change = (speeds / speeds.sum() - 1 / len(curves)) * total / max(iteration, 1)
        scale = 1.0
        for limit, beyond in ((largest - sizes, change - largest + sizes), (1 - sizes, 1 - sizes - change)):
            worst = beyond.argmax()
            if beyond[worst] > 0:
                scale = min(scale, limit[worst] / change[worst])
        changed = np.clip(np.round(sizes + scale * change), 1, largest)
        if np.array_equal(changed, sizes):
            break
        sizes = changed
    return [int(size) for size in sizes]


def linear_fit(curves: Sequence[Curve], total: int) -> list[int]:
    """The exact solver on a line through each curve, fitted by least squares (no time below a microsecond)."""
    profiles = []
    for curve in curves:
        sizes = np.arange(1, len(curve) + 1)
        slope, intercept = np.polyfit(sizes, curve, 1) if len(curve) > 1 else (0.0, curve[0])
        fitted = np.maximum(intercept + slope * sizes, 1e-6)
        profiles.append(RankProfile(TimeCurve(tuple(sizes), tuple(fitted)), len(curve)))
    return plan_fixed_total(profiles, total).batch_sizes


def exact_from_probes(curves: Sequence[Curve], total: int) -> list[int]:
    """Ours as it is used: the exact solver on times measured at powers of two and at the largest batch."""
    return plan_fixed_total([profile(curve, probe_sizes(len(curve))) for curve in curves], total).batch_sizes


def exact_from_curves(curves: Sequence[Curve], total: int) -> list[int]:
    """Ours if every batch size is measured."""
    return plan_fixed_total([profile(curve, range(1, len(curve) + 1)) for curve in curves], total).batch_sizes


def profile(curve: Curve, sizes: Sequence[int]) -> RankProfile:
    """A rank of which only ``sizes`` were measured."""
    return RankProfile(TimeCurve(tuple(sizes), tuple(float(curve[size - 1]) for size in sizes)), len(curve))
