# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Totals that can be cut over the ranks in any time, and the nearest one to a total that cannot."""

from __future__ import annotations

import numpy as np

from accelerate_lshdp.planning.cuts.problem import Problem, is_integer
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.cuts.subset_sums import GroupSums


def checked_total(problem: Problem, total_batch_size: int) -> int:
    """`total_batch_size` as int, if the ranks can do it in any time.

    Raises:
        PlanningError: the ranks cannot; it names the limit and the nearest feasible total (of two, the smaller).
    """
    if not is_integer(total_batch_size):
        raise PlanningError(f"found total_batch_size {total_batch_size!r}, expected an integer number of samples")
    total, ranks = int(total_batch_size), len(problem.times)
    if total < ranks:
        raise PlanningError(
            f"found total_batch_size {total}, expected at least {ranks}, one sample for each rank:"
            f" the nearest feasible total is {ranks}"
        )
    most = sum(problem.largest)
    if total <= most:
        return total
    if not problem.allow_accumulation:
        raise PlanningError(
            f"found total_batch_size {total}, expected at most {most}, the sum of the ranks' largest micro-batches"
            f" {_shortened(problem.largest)}: the nearest feasible total is {most}"
        )
    # Beside a group of one rank every total is feasible: that rank can take any number of micro-batches of one sample.
    if min(map(len, problem.groups)) > 1:
        _check_groups(problem, total)
    return total


def most_steps(problem: Problem, total: int) -> list[int]:
    """The largest number of micro-batches of each group in a cut of `total`: all other ranks have one sample."""
    ranks = len(problem.times)
    return [(total - (ranks - len(group))) // len(group) for group in problem.groups]


def _check_groups(problem: Problem, total: int) -> None:
    """Checks that groups of several ranks, which cannot take every number of samples, can reach `total`."""
    # One more micro-batch of one sample a rank is always possible: the nearest total is not further away than that.
    margin = min(map(len, problem.groups))
    if _reach_in_any_time(problem, total):
        return
    candidates = (total + sign * distance for distance in range(1, margin + 1) for sign in (-1, 1))
    nearest = next(candidate for candidate in candidates if _reach_in_any_time(problem, candidate))
    raise PlanningError(
        f"found total_batch_size {total}, expected one that shard groups of {[len(group) for group in problem.groups]}"
        f" ranks can reach with largest micro-batches of {_shortened(problem.largest)} samples and equal numbers of"
        f" micro-batches inside each group: the nearest feasible total is {nearest}"
    )


def _reach_in_any_time(problem: Problem, total: int) -> bool:
    """Whether the groups can take `total` samples with their largest micro-batches and any number of steps."""
    most = np.array(most_steps(problem, total))
    group = np.repeat(np.arange(len(most)), most)
    steps = np.arange(len(group)) - np.repeat(np.cumsum(most) - most, most) + 1
    low = np.array([len(members) for members in problem.groups])[group]
    high = np.array([sum(problem.largest[rank] for rank in members) for members in problem.groups])[group]
    return GroupSums(len(most), group, steps, low, high).reach(total)


def _shortened(values: list[int]) -> str:
    """A list as text for a message, shortened to 16 values."""
    return str(values) if len(values) <= 16 else f"[{', '.join(map(str, values[:16]))}, ...]"
