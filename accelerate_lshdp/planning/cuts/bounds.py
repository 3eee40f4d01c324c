# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The bound of a certificate on all cuts that were not taken; `proofs.certificate` explains and checks it."""

from __future__ import annotations

import math

import numpy as np

from accelerate_lshdp.planning.cuts.accumulation import AccumulationTables
from accelerate_lshdp.planning.cuts.feasible_totals import most_steps
from accelerate_lshdp.planning.cuts.problem import Problem


def largest_micro_batches_below(problem: Problem, seconds: float, total: int) -> list[list[int]]:
    """For each rank: its largest micro-batches that finish in less than `seconds`, for 1, 2, ... micro-batches.

    A rank's list ends where its group's does: at the first number of micro-batches with which some rank of the group
    cannot finish in time, or which the total rules out.
    """
    if not problem.allow_accumulation:
        counts = [int(np.searchsorted(time.first, seconds, side="left")) for time in problem.times]
        return [[count] if count else [] for count in counts]
    tables = AccumulationTables(problem, most_steps(problem, total))
    # Less than `seconds`, not at most: the float before it.
    return tables.largest_micro_batches(math.nextafter(seconds, 0.0))
