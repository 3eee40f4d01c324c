# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`solve`: the fastest placement by branch and bound, with the tree of branches as its proof.

The bound of a branch is that of its best multipliers (`relaxation`). The branch with the lowest bound is looked at
next: its mixture is rounded to a placement (`rounding`), and it is split in two. If the mixture uses options that make
some peak larger than the branch charges memory for, the split is by the largest of that peak; else by the number of
units that have an option of which the mixture has a fraction. A branch whose bound is not below the best known step is
done. Without branches left the best placement is proven to be the fastest; where the search ends before, the lowest
bound of what is left says how far it may be from that.

For many different units the first bound is within a few parts in ten thousand, as only as many units as there are
multipliers are fractions in a mixture. For few or equal units the search goes on to the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accelerate_lshdp.planning.placement.problem import MULTIPLIER_PARTS, Counts, PlacementProblem
from accelerate_lshdp.planning.placement.relaxation import Relaxation, relax
from accelerate_lshdp.planning.placement.rounding import Improver
from accelerate_lshdp.planning.placement.tables import Branch, Tables


#: Bounds are claimed by this much lower: float64 sums of thousands of terms are off by less.
_ROUNDING = 1e-9
#: Branches that are bounded at most, by the number of units: below 20 as many as have always been enough to end; then
#: what brings the gap below 0.5 % (0.1 % from 100 units on) and takes about 0.1 s for 48 units, 1 s for 1,000. Those
#: of few kinds of units take half the time.
_BRANCHES, _BRANCHES_OF_MANY, _BRANCHES_OF_FEW_KINDS = ((20, 4000), (40, 400)), 80, 160
#: Gaps at which the search ends: where few kinds of units make it short, only rounding.
_FEW_KINDS, _GAP = 20, 5e-4


@dataclass(frozen=True, slots=True)
class Solution:
    """The best placement that was found.

    Args:
        counts: units of each kind with each option.
        nanoseconds: of a step.
        memory: bytes of each row.
        bound: nanoseconds that no placement within the limits undercuts.
        proof: the tree of branches with the multipliers of its leaves, which proves the bound: JSON values. Nodes are
            in one list, as documents may not be nested deeply; a node comes after the one that it is a part of.
    """

    counts: Counts
    nanoseconds: int
    memory: tuple[int, ...]
    bound: int
    proof: list[dict[str, Any]]

    @property
    def gap(self) -> float:
        """By which part of its step the placement may be slower than the fastest one."""
        return 1 - self.bound / self.nanoseconds if self.nanoseconds else 0.0


@dataclass(slots=True)
class _Node:
    """A branch in the tree: a leaf has multipliers, others were split."""

    branch: Branch
    bound: float
    relaxation: Relaxation | None = None
    split: list[Any] | None = None
    children: list[_Node] = field(default_factory=list)


def solve(
    problem: PlacementProblem,
    *,
    known: Sequence[Counts] = (),
    gap: float | None = None,
    most_branches: int | None = None,
) -> Solution | None:
    """The fastest placement that keeps all limits.

    Args:
        problem: what there is to choose.
        known: placements to begin with; those that break a limit are left out. No worse one is returned.
        gap: the search ends when the best placement is proven to be at most this part slower than the fastest one.
            None: 0 for few kinds of units.
        most_branches: it ends, too, when so many branches were bounded. None: by the number of units.

    Returns:
        None if no placement keeps all limits, or none was found among so many branches.
    """
    if gap is None:
        gap = _GAP if len(problem.kinds) >= _FEW_KINDS else 0.0
    if most_branches is None:
        most_branches = _branches_of(problem)
    search = _Search(problem, Tables(problem), gap)
    for counts in known:
        search.offer(search.tables.array_of(counts))
    return search.solution(search.explore(most_branches))


def _branches_of(problem: PlacementProblem) -> int:
    for below, most in _BRANCHES:
        if problem.unit_count < below:
            return most
    return _BRANCHES_OF_FEW_KINDS if len(problem.kinds) < _FEW_KINDS else _BRANCHES_OF_MANY


def search_room(problem: PlacementProblem, most_branches: int) -> Counts | None:
    """A placement that keeps all limits, however slow; None: none was found among so many branches."""
    tables = Tables(problem)
    tables.leave_out_time()
    search = _Search(problem, tables, 0.0)
    search.explore(most_branches)
    return None if search.best is None else tables.counts_of(search.best.astype(np.int64))


def bound_of(problem: PlacementProblem) -> float:
    """Nanoseconds that no placement within the limits undercuts: from one relaxation, which is soon done."""
    tables = Tables(problem)
    relaxation = relax(tables, Branch.whole(tables), start=_first_multipliers(tables), known=[], enough=np.inf)
    return relaxation.bound * (1 - _ROUNDING) * tables.scale_time


def _first_multipliers(tables: Tables) -> np.ndarray:
    return np.r_[tables.times / 2, np.zeros(len(tables.right) - tables.phase_count)]


class _Search:
    def __init__(self, problem: PlacementProblem, tables: Tables, gap: float) -> None:
        self.problem, self.tables, self.gap = problem, tables, gap
        # No placement takes longer: a branch with a higher bound has none that keeps the limits.
        self.beyond = tables.longest * (1 + 1e-6) + 1e-6
        self.best: np.ndarray | None = None
        self.best_time = np.inf
        #: Placements that were looked at, before and after they were made to keep the limits.
        self.rounded: set[bytes] = set()
        self.tried: set[bytes] = set()

    def offer(self, counts: np.ndarray) -> None:
        """Takes a placement as the best one if it keeps the limits and is faster."""
        time = float(self.tables.time(*self.tables.sums(counts)))
        if time < self.best_time and self.problem.fits(self.tables.counts_of(counts.astype(np.int64))):
            self.best, self.best_time = counts, time

    @property
    def enough(self) -> float:
        """The bound from which on a branch is done."""
        return self.best_time * (1 - max(self.gap, _ROUNDING)) if self.best is not None else self.beyond

    def explore(self, most_branches: int) -> _Node:
        """Looks at branches until the best placement is known or there were too many; returns the tree's root."""
        root = _Node(Branch.whole(self.tables), -np.inf)
        self._bound(root, _first_multipliers(self.tables), [])
        # Ties in the order in which branches were made, so that every run is the same.
        queue, made = [(root.bound, 0, root)], 1
        bounded = 1
        while queue and queue[0][0] < self.enough and bounded < most_branches:
            _, _, node = heapq.heappop(queue)
            node.split, branches = self._split(node)
            if node.split is None:
                # Nothing is left to choose: the bound is met up to rounding, or the branch has no room.
                heapq.heappush(queue, (np.inf, made, node))
                made += 1
                continue
            for branch in branches:
                child = _Node(branch, np.inf)
                node.children.append(child)
                if not branch.is_empty(self.tables):
                    relaxation = node.relaxation
                    self._bound(child, relaxation.multipliers, relaxation.parts)
                    bounded += 1
                heapq.heappush(queue, (child.bound, made, child))
                made += 1
            node.relaxation = None
        return root

    def _bound(self, node: _Node, start: np.ndarray, known: list[np.ndarray]) -> None:
        tables = self.tables
        relaxation = relax(tables, node.branch, start=start, known=known, enough=self.enough)
        node.relaxation, node.bound = relaxation, relaxation.bound
        if relaxation.bound >= self.enough:
            return
        improver = Improver(tables, relaxation.multipliers)
        # Where the search begins, the largest part of the mixture is a second start.
        starts = [improver.rounded(relaxation.mixture), *relaxation.parts[: self.best is None]]
        for counts in starts:
            # Neighbouring branches often round to the same placement, or to one that is repaired to the same.
            if (key := counts.tobytes()) in self.rounded:
                continue
            self.rounded.add(key)
            repaired = improver.repaired(counts)
            if repaired is not None and (key := repaired.tobytes()) not in self.tried:
                self.tried.add(key)
                self.offer(improver.improved(repaired))
                if relaxation.bound >= self.enough:
                    return

    def _split(self, node: _Node) -> tuple[list[Any] | None, tuple[Branch, ...]]:
        """How to split a branch, and its two parts; None: nothing is left to choose."""
        tables, branch, relaxation = self.tables, node.branch, node.relaxation
        mixture = relaxation.mixture
        # Peaks of the mixture that the branch does not charge for matter where they break a limit. Prices would not
        # show it: they are 0 where the mixture seems to have room.
        used = tables.used_peaks(mixture * (mixture > 1e-9))
        uncharged = np.maximum(0.0, used - branch.floor)
        _, sums = tables.sums(mixture)
        beyond = sums[tables.phase_count :] - tables.room(used)
        if uncharged.any() and beyond.max() > _ROUNDING:
            peak = int((tables.peak_weights[int(beyond.argmax())] * uncharged).argmax())
            if uncharged[peak]:
                return self._split_peak(branch, peak, used[peak])
        # The number of units that recompute decides most about memory, and many options are alike but for that.
        recomputing = np.where(tables.recomputes, mixture, 0.0).sum(1)
        fraction = np.abs(recomputing - np.round(recomputing))
        kind = int(fraction.argmax())
        if fraction[kind] > 1e-7:
            below = int(np.floor(recomputing[kind]))
            return ["recomputing", kind, below], branch.split_recomputing(kind, below)
        fraction = np.abs(mixture - np.round(mixture))
        kind, option = np.unravel_index(int(fraction.argmax()), fraction.shape)
        if fraction[kind, option] > 1e-7:
            below = int(np.floor(mixture[kind, option]))
            return ["count", int(kind), int(option), below], branch.split_count(kind, option, below)
        if uncharged.any():
            peak = int(uncharged.argmax())
            return self._split_peak(branch, peak, used[peak])
        free = np.argwhere(branch.most > branch.least)
        if not len(free):
            return None, ()
        kind, option = free[0]
        below = int((branch.most[kind, option] + branch.least[kind, option]) // 2)
        return ["count", int(kind), int(option), below], branch.split_count(kind, option, below)

    def _split_peak(self, branch: Branch, peak: int, used: float) -> tuple[list[Any], tuple[Branch, ...]]:
        """Splits at the middle of the sizes that the largest may have, below the one that the mixture has."""
        sizes = self.tables.peak_sizes[peak]
        low = int(np.searchsorted(sizes, branch.floor[peak]))
        high = int(np.searchsorted(sizes, used))
        # Just below the next size: the part beyond it is charged for that size, not for a byte more than the last.
        below = int(sizes[(low + high + 1) // 2]) - 1
        return ["peak", peak, below], branch.split_peak(self.tables, peak, below)

    # What comes out

    def solution(self, root: _Node) -> Solution | None:
        """The best placement, with the tree as its proof; None: none was found."""
        if self.best is None:
            return None
        counts = self.tables.counts_of(self.best.astype(np.int64))
        nanoseconds = self.problem.nanoseconds(counts)
        nodes, leaves = self._proof(root)
        lowest = min([self.best_time, *(leaf.bound for leaf in leaves)])
        bound = int(lowest * (1 - _ROUNDING) * self.tables.scale_time)
        return Solution(counts, nanoseconds, tuple(self.problem.memory(counts)), max(0, bound), nodes)

    def _proof(self, root: _Node) -> tuple[list[dict[str, Any]], list[_Node]]:
        """The nodes of the proof, and the leaves of the tree."""
        order = [root]
        nodes: list[dict[str, Any]] = []
        for node in order:  # grows while it is read
            if node.children:
                nodes.append({"split": node.split, "parts": [len(order), len(order) + 1]})
                order += node.children
            else:
                nodes.append(self._multipliers(node))
        return nodes, [node for node in order if not node.children]

    def _multipliers(self, leaf: _Node) -> dict[str, Any]:
        if leaf.relaxation is None:
            return {}  # no placement is in it, which needs no multipliers
        multipliers = leaf.relaxation.multipliers
        phases = self.tables.phase_count
        # Rounded down: a multiplier may not exceed `times`.
        return {
            "phases": [int(value * MULTIPLIER_PARTS) for value in multipliers[:phases]],
            "rows": [
                int(value * self.tables.scale_time / scale * MULTIPLIER_PARTS)
                for value, scale in zip(multipliers[phases:], self.tables.scale_memory, strict=True)
            ],
        }
