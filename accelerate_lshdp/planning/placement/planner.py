# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`plan_placement`: batch sizes and the placement of every unit that train the most samples a second.

The objective is time per sample. The smallest step alone would be that of the smallest batch. For each candidate batch
a bound on its throughput comes from one relaxation; batches are solved in the order of their bounds, until no bound is
above the best throughput found. Of models with few units, batches that may be better than the best one are looked at
more closely at the end. Every uniform placement that fits is a start of the search for its batch, so the result is
never slower than the best of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accelerate_lshdp.documents.placement import UnitStore
from accelerate_lshdp.planning.cuts.step_time import PlanningError
from accelerate_lshdp.planning.placement.batches import Batch, Batches, require_total
from accelerate_lshdp.planning.placement.inputs import ModelSizes, PlacementCluster
from accelerate_lshdp.planning.placement.limits import largest_micro_batches, require_room, uniform_micro_batches
from accelerate_lshdp.planning.placement.options import pose_placement, uniform_placements
from accelerate_lshdp.planning.placement.problem import PlacementProblem
from accelerate_lshdp.planning.placement.result import PlacementResult
from accelerate_lshdp.planning.placement.room import find_room
from accelerate_lshdp.planning.placement.search import Solution, bound_of, solve
from accelerate_lshdp.planning.placement.unit_costs import SLICES, UnitCosts


_ROUNDS = 40
#: Branches that are bounded for each batch. Of many units the best placement is nearly always found in the first few;
#: the others prove that it is the best, and that is done for the best batch alone.
_BRANCHES_OF_A_BATCH = 12
#: Of fewer units a batch that may still be better is looked at more closely: so many batches, with so many branches.
_FEW_UNITS, _CLOSER_BATCHES, _BRANCHES_OF_A_CLOSER_LOOK = 40, 24, 120


@dataclass(frozen=True, slots=True)
class Choice:
    """What may be chosen for units.

    Args:
        stores: None: all that differ on the cluster.
        checkpoint: whether units may keep activations (False), recompute them (True), or either.
        slices: numbers of slices in which units of store `world`, and a root on the host, may be gathered.
    """

    stores: tuple[UnitStore, ...] | None = None
    checkpoint: tuple[bool, ...] = (False, True)
    slices: tuple[int, ...] = SLICES


def plan_placement(
    model: ModelSizes,
    cluster: PlacementCluster,
    *,
    total_batch_size: int | None = None,
    most_steps: int = 1,
    choice: Choice | None = None,
) -> PlacementResult:
    """The batch sizes and the placement with the most samples a second that keep all limits.

    Args:
        model: sizes of its units.
        cluster: ranks, links and limits.
        total_batch_size: samples that the global batch has to have. None: any number.
        most_steps: the most micro-batches of a step; all ranks have the same number.
        choice: what units may have. None: everything.

    Raises:
        PlanningError: nothing fits the limits, and it names the nearest limits that something fits; or the total
            cannot be cut, and it names the nearest that can.
    """
    return _Planner(model, cluster, total_batch_size, most_steps, choice or Choice()).plan()


class _Planner:
    def __init__(
        self,
        model: ModelSizes,
        cluster: PlacementCluster,
        total: int | None,
        most_steps: int,
        choice: Choice,
    ) -> None:
        self.model, self.cluster, self.total = model, cluster, total
        self.costs = UnitCosts(model, cluster, choice.stores, choice.checkpoint, choice.slices)
        smallest = self._problem(Batch((1,) * cluster.world))
        require_room(smallest)
        most = largest_micro_batches(self._problem, cluster)
        full = [
            sizes
            for steps in range(1, min(2, most_steps) + 1)  # more of them need no more memory
            for sizes in uniform_micro_batches(self._problem, cluster, steps)
        ]
        self.batches = Batches(cluster, most, full, total, most_steps)
        require_total(self.batches)
        self.best: tuple[float, Batch, PlacementProblem, Solution] | None = None
        self.seen: set[Batch] = set()
        #: Batches that were solved and may be better than was found: nanoseconds a sample that nothing undercuts.
        self.open: dict[Batch, tuple[float, PlacementProblem, Solution]] = {}

    def plan(self) -> PlacementResult:
        self._try(self.batches.first())
        if self.best is None:
            self._refuse()
        for _ in range(_ROUNDS):
            before = self.best[1]
            self._try(self.batches.neighbours(before))
            if self.best[1] == before:
                self._look_closer()
            if self.best[1] == before:
                break
        _, batch, problem, solution = self.best
        solution = solve(problem, known=[solution.counts]) or solution
        return PlacementResult.of(problem, solution, tuple((size, batch.steps) for size in batch.sizes))

    def _problem(self, batch: Batch) -> PlacementProblem:
        return pose_placement(self.model, self.cluster, batch.sizes, batch.steps, costs=self.costs)

    def _try(self, batches: Iterable[Batch]) -> None:
        """Solves the batches that may be better than the best one, the most promising first."""
        candidates = []
        for batch in batches:
            if batch in self.seen:
                continue
            self.seen.add(batch)
            problem = self._problem(batch)
            # Computing alone takes so long: no relaxation is needed to see that it is too slow.
            if self._is_beaten(batch, problem.computing):
                continue
            known = [counts for counts in uniform_placements(problem) if problem.fits(counts)]
            if not known and (room := find_room(problem)) is not None:
                known = [room]
            if known:
                bound = bound_of(problem) / batch.total
                candidates.append((bound, batch.total, batch.sizes, batch, problem, known))
        candidates.sort(key=lambda candidate: candidate[:3])
        for bound, *_, batch, problem, known in candidates:
            if self.best is not None and bound >= self.best[0]:
                break
            solution = solve(problem, known=known, most_branches=_BRANCHES_OF_A_BATCH)
            if solution is not None:
                self._offer(batch, problem, solution)
                if problem.unit_count < _FEW_UNITS and solution.gap:
                    self.open[batch] = solution.bound / batch.total, problem, solution

    def _look_closer(self) -> None:
        """Solves batches of which a few branches have not shown that they are slower, the most promising first."""
        for batch in sorted(self.open, key=lambda batch: self.open[batch][0])[:_CLOSER_BATCHES]:
            bound, problem, solution = self.open.pop(batch)
            if bound >= self.best[0]:
                break
            closer = solve(problem, known=[solution.counts], most_branches=_BRANCHES_OF_A_CLOSER_LOOK)
            self._offer(batch, problem, closer or solution)

    def _offer(self, batch: Batch, problem: PlacementProblem, solution: Solution) -> None:
        if not self._is_beaten(batch, solution.nanoseconds):
            self.best = (solution.nanoseconds / batch.total, batch, problem, solution)

    def _is_beaten(self, batch: Batch, nanoseconds: int) -> bool:
        return self.best is not None and nanoseconds / batch.total >= self.best[0]

    def _refuse(self) -> None:
        """Raises for a total of which no cut fits the limits."""
        batch = max(self.batches.first(), key=lambda batch: batch.steps)
        require_room(self._problem(batch))
        raise PlanningError(
            f"found no placement for a global batch of {self.total} samples, expected one that keeps the limits of"
            " memory: allow more micro-batches in a step, or take fewer samples"
        )
