# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The search for placements: the optimum where all can be tried, a stated gap where they cannot."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_problems import least_nanoseconds, placement_count, problem_of_different_units, random_problem

from accelerate_lshdp.planning import CertificateError
from accelerate_lshdp.planning.placement.options import uniform_placements
from accelerate_lshdp.planning.placement.problem import MULTIPLIER_PARTS, PlacementProblem
from accelerate_lshdp.planning.placement.result import certificate_of
from accelerate_lshdp.planning.placement.room import find_room
from accelerate_lshdp.planning.placement.search import solve
from accelerate_lshdp.planning.proofs.placement import verify_placement


#: Placements that are tried in one case at most.
_MOST_TRIED = 15_000


def small_problems(count: int, first_seed: int = 0) -> list[PlacementProblem]:
    """Problems of 1 to 19 units: many kinds of few units, and few kinds of many; all shapes in turn."""
    shapes = [
        {"kinds": kinds, "units": units, "options": options, "rows": rows, "phases": phases}
        for kinds, units, options in ((1, 19, 4), (2, 9, 3), (3, 4, 3), (5, 2, 4), (7, 1, 4), (9, 1, 3), (15, 1, 2))
        for rows in (1, 2)
        for phases in (2, 4)
    ]
    problems, seed = [], first_seed
    while len(problems) < count:
        problem = random_problem(seed, **shapes[seed % len(shapes)])
        seed += 1
        if placement_count(problem) <= _MOST_TRIED:
            problems.append(problem)
    return problems


@pytest.mark.parametrize("part", range(5))
def test_optimum_of_500_small_problems(part: int) -> None:
    solved = 0
    for place, problem in enumerate(small_problems(100, 1000 * part)):
        assert problem.unit_count < 20
        expected, solution = least_nanoseconds(problem), solve(problem)
        assert (solution is None) == (expected is None), f"case {place}"
        if solution is None:
            assert find_room(problem) is None
            continue
        solved += 1
        assert solution.nanoseconds == expected, f"case {place}"
        assert solution.bound <= expected
        assert problem.nanoseconds(solution.counts) == expected
        assert problem.fits(solution.counts)
    assert 50 < solved < 100  # some limits are too small for anything


@pytest.mark.parametrize("units, most", [(20, 0.005), (30, 0.005), (48, 0.005), (100, 0.001)])
def test_gap_of_different_units(units: int, most: float) -> None:
    gaps = []
    for seed in range(8):
        problem = problem_of_different_units(seed, units)
        solution = solve(problem, known=uniform_placements(problem))
        assert problem.fits(solution.counts) and solution.nanoseconds == problem.nanoseconds(solution.counts)
        gaps.append(solution.gap)
    assert min(gaps) >= 0 and max(gaps) <= most


def test_gap_of_a_thousand_different_units() -> None:
    assert solve(problem_of_different_units(0, 1000)).gap <= 0.001


def test_a_known_placement_is_never_made_worse() -> None:
    problem = random_problem(3, kinds=30, units=2, options=8, scale=10**6, tightness=0.5)
    best = solve(problem)
    # No branch is looked at but the first, and no gap is small enough to stop before it.
    again = solve(problem, known=[best.counts], most_branches=1, gap=0.0)
    assert again.nanoseconds == best.nanoseconds


def test_a_known_placement_beyond_the_limits_is_left_out() -> None:
    seen = 0
    for seed in range(30):
        problem = random_problem(seed, kinds=4, units=2, options=4, tightness=0.7)
        ample = replace(problem, rows=tuple(replace(row, limit=2**62) for row in problem.rows))
        beyond, expected = solve(ample).counts, least_nanoseconds(problem)
        if problem.fits(beyond) or expected is None:
            continue
        seen += 1
        assert solve(problem, known=[beyond]).nanoseconds == expected
    assert seen >= 5


def test_what_no_unit_can_keep_is_found_out_at_once() -> None:
    problem = random_problem(5, kinds=200, units=1, options=10, scale=10**6, tightness=0.5)
    needed = sum(min(option.memory[0] for option in kind.options) for kind in problem.kinds)
    rows = (replace(problem.rows[0], limit=needed + problem.rows[0].fixed),)  # nothing is left for what is gathered
    assert find_room(replace(problem, rows=rows)) is None


def test_largest_units_are_charged_for_exactly() -> None:
    """A limit that two gathered units exceed by one byte decides against gathering them."""
    problem = random_problem(8, kinds=3, units=4, options=3, tightness=1.0)
    for weight in (1, 2):
        row = replace(problem.rows[0], peak_weights=(weight, 1, 1))
        within = solve(replace(problem, rows=(replace(row, limit=2**62),)))
        needed = within.memory[0]
        exact = solve(replace(problem, rows=(replace(row, limit=needed),)))
        assert exact.nanoseconds == within.nanoseconds
        less = replace(problem, rows=(replace(row, limit=needed - 1),))
        assert solve(less).nanoseconds == least_nanoseconds(less)
        assert solve(less).memory[0] < needed


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_all_multipliers_give_a_bound(data: st.DataObject) -> None:
    """Not only those of the search: any from 0 to the times of the phases, and any of at least 0 for memory."""
    problem = random_problem(data.draw(st.integers(0, 40)), kinds=3, units=3, options=3, rows=2, tightness=0.9)
    expected = least_nanoseconds(problem)
    proof = [
        {
            "phases": [data.draw(st.integers(0, phase.times * MULTIPLIER_PARTS)) for phase in problem.phases],
            "rows": [data.draw(st.integers(0, 2 * MULTIPLIER_PARTS)) for _ in problem.rows],
        }
    ]
    solution = solve(problem)
    if solution is None:
        return
    certificate = certificate_of(problem, solution) | {"proof": proof}
    slower = max_nanoseconds_within(problem)
    if slower is not None and slower[0] > expected:
        nanoseconds, counts = slower
        other = certificate | {
            "counts": counts,
            "step_nanoseconds": nanoseconds,
            "memory_bytes": problem.memory(counts),
            "bound_nanoseconds": expected + 1,  # and so false
        }
        with pytest.raises(CertificateError, match="does not hold"):
            verify_placement(problem, other)


def max_nanoseconds_within(problem: PlacementProblem) -> tuple[int, list[list[int]]] | None:
    """The slowest placement within the limits in which all units of a kind are alike."""
    found = []
    for chosen in itertools.product(*(range(len(kind.options)) for kind in problem.kinds)):
        counts = [
            [len(kind.units) * (place == own) for place in range(len(kind.options))]
            for kind, own in zip(problem.kinds, chosen, strict=True)
        ]
        if problem.fits(counts):
            found.append((problem.nanoseconds(counts), counts))
    return max(found, default=None)
