# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`find_room`: whether some placement keeps all limits of memory, however slow it is.

With limits on the largest of each peak, every unit takes the option that needs least memory among those within them.
All limits that differ are tried, so with one row of memory nothing is missed. Several rows are weighed against each
other: each alone, all alike, and the largest of them. What that misses, a search in which all placements are equally
fast may find.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from accelerate_lshdp.planning.placement.problem import Counts, PlacementProblem
from accelerate_lshdp.planning.placement.search import search_room
from accelerate_lshdp.planning.placement.tables import Tables


#: Sizes that are tried as the largest of a peak at most; of more, these many spread over them.
_SIZES = 7
#: Branches that are bounded at most: more are needed only within a part of a unit of the smallest limits.
_BRANCHES = 16


def find_room(problem: PlacementProblem, most_branches: int = _BRANCHES) -> Counts | None:
    """A placement that keeps all limits.

    Args:
        problem: what there is to choose.
        most_branches: that the search bounds at most.

    Returns:
        None if there is none, or none was found.
    """
    tables = Tables(problem)
    rows = len(problem.rows)
    for largest in _largest_peaks(tables):
        allowed = tables.valid & (tables.peaks <= largest).all(-1)
        if not allowed.any(1).all():
            continue
        memory = tables.columns[..., tables.phase_count :]  # as a share of the limits
        ways = [(memory @ weights, weights) for weights in np.eye(rows)]
        if rows > 1:
            # Moments of one rank differ little in what they need: the most at any of them is a bound.
            ways = [(memory.sum(-1), np.ones(rows)), (memory.max(-1), np.ones(rows)), *ways]
        for needed, weights in ways:
            # Ties go to smaller peaks.
            needed = needed + 1e-9 * (tables.peaks @ (weights @ tables.peak_weights))
            chosen = np.where(allowed, needed, np.inf).argmin(1)
            counts = np.zeros(tables.valid.shape, dtype=np.int64)
            counts[np.arange(len(chosen)), chosen] = tables.units
            found = tables.counts_of(counts)
            if _nearly_fits(tables, counts) and problem.fits(found):
                return found
    return search_room(problem, most_branches) if rows > 1 or _has_more_sizes(tables) else None


def _largest_peaks(tables: Tables) -> Iterator[np.ndarray]:
    """Limits on the largest of each peak, in bytes: [3]."""
    spread = [
        sizes[np.unique(np.linspace(0, len(sizes) - 1, _SIZES).astype(int))] if len(sizes) > _SIZES else sizes
        for sizes in tables.peak_sizes
    ]
    return (np.array(largest) for largest in product(*spread))


def _has_more_sizes(tables: Tables) -> bool:
    return any(len(sizes) > _SIZES for sizes in tables.peak_sizes)


def _nearly_fits(tables: Tables, counts: np.ndarray) -> bool:
    """A quick test that lets pass what rounding may have spoilt."""
    _, sums = tables.sums(counts)
    return bool((sums[tables.phase_count :] <= tables.room(tables.used_peaks(counts)) + 1e-9).all())
