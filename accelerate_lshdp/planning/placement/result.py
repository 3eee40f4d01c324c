# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""`PlacementResult`: a placement and batch sizes, what they are predicted to take, and the proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate_lshdp.documents.placement import ModelPlacement, UnitPlacement
from accelerate_lshdp.planning.placement.problem import PlacementProblem
from accelerate_lshdp.planning.placement.search import Solution


@dataclass(frozen=True, slots=True)
class PlacementPrediction:
    """What a placement is predicted to take; the `predicted` section of a plan.

    Args:
        step_seconds: of a step.
        samples_per_second: of all ranks.
        memory_bytes: of each rank, at the moment of a step when it needs most. What it needs before the first step,
            while the script's whole model is still there, keeps the limits, too, and is not in here.
        memory_limit_bytes: of each rank.
        gap: by which part of its step the placement may be slower than the fastest one for these batch sizes.
    """

    step_seconds: float
    samples_per_second: float
    memory_bytes: tuple[int, ...]
    memory_limit_bytes: tuple[int, ...]
    gap: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "memory_bytes": list(self.memory_bytes),
            "memory_limit_bytes": list(self.memory_limit_bytes),
            "gap": self.gap,
        }


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """A planned placement.

    Args:
        placement: of all units, by the names of their modules.
        micro_batches: (samples, number in a step) of each rank.
        predicted: seconds and memory.
        certificate: JSON values from which `verify_placement` checks seconds, memory and gap against `problem`.
        problem: of placing the units with these micro-batches.
    """

    placement: ModelPlacement
    micro_batches: tuple[tuple[int, int], ...]
    predicted: PlacementPrediction
    certificate: dict[str, Any]
    problem: PlacementProblem

    @classmethod
    def of(
        cls, problem: PlacementProblem, solution: Solution, micro_batches: tuple[tuple[int, int], ...]
    ) -> PlacementResult:
        """The result of a solved problem."""
        memory, limits = zip(*problem.by_rank(solution.memory).values(), strict=True)
        seconds = solution.nanoseconds / 1e9
        total = sum(size * steps for size, steps in micro_batches)
        return cls(
            ModelPlacement(units=units_of(problem, solution), memory_limit_bytes=limits),
            micro_batches,
            PlacementPrediction(seconds, total / seconds, memory, limits, solution.gap),
            certificate_of(problem, solution),
            problem,
        )

    @property
    def total_batch_size(self) -> int:
        """Samples in the global batch."""
        return sum(size * steps for size, steps in self.micro_batches)


def certificate_of(problem: PlacementProblem, solution: Solution) -> dict[str, Any]:
    """What a solution claims, and the proof: JSON values."""
    return {
        "kind": "placement",
        "problem_sha256": problem.sha256(),
        "counts": [list(own) for own in solution.counts],
        "step_nanoseconds": solution.nanoseconds,
        "memory_bytes": list(solution.memory),
        "bound_nanoseconds": solution.bound,
        "proof": solution.proof,
    }


def units_of(problem: PlacementProblem, solution: Solution) -> tuple[tuple[str, UnitPlacement], ...]:
    """The placement of each unit by its name.

    Which of several equal units have an option does not matter to the prediction. They take turns, as evenly as the
    counts allow, so that what is sent is spread over each phase. But where some exchanges stop the computing, units
    that send beside it come last: their backward is the first, and leaves them the most computing to travel beside.
    """
    placements = []
    for kind, counts in zip(problem.kinds, solution.counts, strict=True):
        count = len(kind.units)
        # The i-th of n units with an option belongs at (i + 1/2) / n of the way.
        places = sorted(
            ((number + 0.5) / own, option, number) for option, own in enumerate(counts) for number in range(own)
        )
        assert len(places) == count
        places.sort(key=lambda place: any(kind.options[place[1]].send))
        placements += [
            (name, kind.options[option].placement) for name, (_, option, _) in zip(kind.units, places, strict=True)
        ]
    return tuple(placements)
