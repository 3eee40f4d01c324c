# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""A placement's certificate proves its time, its memory and its bound to other code; a false one proves nothing."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from placement_problems import (
    compositions,
    least_nanoseconds,
    placement_count,
    problem_of_different_units,
    random_problem,
)

import accelerate_lshdp.planning as planning
from accelerate_lshdp.planning import CertificateError
from accelerate_lshdp.planning.placement.problem import PlacementProblem
from accelerate_lshdp.planning.placement.result import certificate_of
from accelerate_lshdp.planning.placement.search import solve
from accelerate_lshdp.planning.proofs.placement import verify_placement


def certified(problem: PlacementProblem, **options: Any) -> dict[str, Any]:
    """The certificate of a problem as it comes back from a file."""
    return json.loads(json.dumps(certificate_of(problem, solve(problem, **options))))


def small_problem(seed: int) -> PlacementProblem:
    """One that has placements within its limits, of which all can be tried, and whose proof has several nodes."""
    while True:
        kinds, units = ((2, 5), (3, 3), (5, 1))[seed % 3]
        problem = random_problem(
            seed, kinds=kinds, units=units, options=4, rows=1 + seed % 2, phases=2 + 2 * (seed % 2)
        )
        solution = solve(problem) if placement_count(problem) <= 8000 else None
        if solution is not None and len(solution.proof) > 1:
            return problem
        seed += 1000


@pytest.mark.parametrize("seed", range(40))
def test_what_is_solved_is_verified(seed: int) -> None:
    shape = {"kinds": 1 + seed % 5, "units": 1 + seed % 7, "options": 2 + seed % 5, "rows": 1 + seed % 3}
    problem = random_problem(seed, phases=2 + 2 * (seed % 2), tightness=0.9, **shape)
    verify_placement(problem, certified(problem))


@pytest.mark.parametrize("units", [24, 100])
def test_what_is_solved_with_a_gap_is_verified(units: int) -> None:
    problem = problem_of_different_units(3, units)
    verify_placement(problem, certified(problem))
    # An unfinished search has a lower bound, which holds as well.
    verify_placement(problem, certified(problem, most_branches=1))


# Each makes one claim of a valid certificate false, and says which complaint must follow.
Change = Callable[[dict[str, Any]], Any]
TAMPERED: dict[str, tuple[Change, str]] = {
    "a shorter step": (lambda c: c.update(step_nanoseconds=c["step_nanoseconds"] - 1), "step_nanoseconds"),
    "a longer step": (lambda c: c.update(step_nanoseconds=c["step_nanoseconds"] + 1), "step_nanoseconds"),
    "a step that is no integer": (
        lambda c: c.update(step_nanoseconds=float(c["step_nanoseconds"])),
        "found step_nanoseconds",
    ),
    "less memory": (lambda c: c["memory_bytes"].__setitem__(0, c["memory_bytes"][0] - 1), "so much is needed"),
    "memory of no row": (lambda c: c["memory_bytes"].append(0), "so much is needed"),
    "a bound beyond the step": (
        lambda c: c.update(bound_nanoseconds=c["step_nanoseconds"] + 1),
        "from 0 to the step's",
    ),
    "a negative bound": (lambda c: c.update(bound_nanoseconds=-1), "from 0 to the step's"),
    "a unit too many": (
        lambda c: c["counts"][0].__setitem__(0, c["counts"][0][0] + 1),
        "expected ones of at least 0 that sum to",
    ),
    "an option of nobody": (lambda c: c["counts"][0].append(0), "expected lists of"),
    "another problem": (lambda c: c.update(problem_sha256="0" * 64), "another model, cluster or batch"),
    "another kind": (lambda c: c.update(kind="fixed_total"), "expected an object of the kind placement"),
    "an unknown key": (lambda c: c.update(more=1), "expected an object of the kind placement"),
    "no proof": (lambda c: c.update(proof=[]), "found the proof"),
    "half of a split": (lambda c: c["proof"][0].update(parts=[1]), "expected two nodes after it"),
    "the same part twice": (lambda c: c["proof"][0].update(parts=[1, 1]), "expected two nodes after it"),
    "a circle": (lambda c: c["proof"][0].update(parts=[0, 1]), "expected two nodes after it"),
    "a part that is missing": (lambda c: c["proof"][0].update(parts=[1, 10**6]), "expected two nodes after it"),
    "a split of nothing": (lambda c: c["proof"][0].update(split=["count", 99, 0, 0]), "found the split"),
    "a split by nothing": (lambda c: c["proof"][0].update(split=["peak", 3, 0]), "found the split"),
    "a node too many": (lambda c: c["proof"].append({}), "is no part of one before it"),
    "a negative multiplier of memory": (
        lambda c: next(n for n in c["proof"] if n.get("rows"))["rows"].__setitem__(0, -1),
        "expected one for each phase",
    ),
    "a multiplier beyond its phase": (
        lambda c: next(n for n in c["proof"] if n.get("phases"))["phases"].__setitem__(0, 2**60),
        "expected one for each phase",
    ),
    "a multiplier that is missing": (
        lambda c: next(n for n in c["proof"] if n.get("phases"))["phases"].pop(),
        "expected one for each phase",
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_one_false_claim_is_found(case: str) -> None:
    change, complaint = TAMPERED[case]
    problem = small_problem(1)
    certificate = certified(problem)
    verify_placement(problem, certificate)
    change(certificate)
    with pytest.raises(CertificateError, match=complaint):
        verify_placement(problem, certificate)


def test_a_bound_that_is_too_high_is_found() -> None:
    """The largest bound that a proof carries is not above the optimum, and one more is refused."""
    problem = small_problem(2)
    certificate = certified(problem)
    optimum = least_nanoseconds(problem)
    certificate["bound_nanoseconds"] = optimum
    slower = copy.deepcopy(certificate)
    other = next(
        counts for counts in _placements(problem) if problem.fits(counts) and problem.nanoseconds(counts) > optimum + 1
    )
    slower.update(
        counts=other,
        step_nanoseconds=problem.nanoseconds(other),
        memory_bytes=problem.memory(other),
        bound_nanoseconds=optimum + 1,
    )
    with pytest.raises(CertificateError, match="the bound does not hold"):
        verify_placement(problem, slower)


def test_a_certificate_of_another_limit_is_refused() -> None:
    problem = small_problem(3)
    certificate = certified(problem)
    row = replace(problem.rows[0], limit=problem.rows[0].limit + 1)
    with pytest.raises(CertificateError, match="another model, cluster or batch"):
        verify_placement(replace(problem, rows=(row, *problem.rows[1:])), certificate)


@pytest.mark.parametrize("mutations", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_mutated_certificate_with_a_false_claim_is_accepted(mutations: int) -> None:
    """Certificates with one or two changes: what is accepted is true, by trying all placements."""
    rng = random.Random(0)
    accepted = 0
    cases = [(problem := small_problem(seed), certified(problem), least_nanoseconds(problem)) for seed in range(25)]
    for number in range(mutations):
        problem, valid, optimum = cases[number % len(cases)]
        certificate = copy.deepcopy(valid)
        for _ in range(rng.choice((1, 1, 2))):
            _mutate(certificate, rng, problem)
        if certificate == valid:
            continue
        try:
            verify_placement(problem, certificate)
        except CertificateError:
            continue
        accepted += 1
        counts = certificate["counts"]
        assert problem.fits(counts) and problem.nanoseconds(counts) == certificate["step_nanoseconds"]
        assert problem.memory(counts) == certificate["memory_bytes"]
        assert certificate["bound_nanoseconds"] <= optimum
    # A lower bound, another multiplier or a placement with its own figures is true, too: the test sees some.
    assert 0.01 * mutations < accepted < 0.5 * mutations


def _mutate(certificate: dict[str, Any], rng: random.Random, problem: PlacementProblem) -> None:
    """One change: of a number anywhere, of a proof's shape, or to another placement with its own, true figures."""
    kind = rng.randrange(6)
    if kind == 0:
        counts = [list(own) for own in certificate["counts"]]
        own = rng.choice(counts)
        giving, taking = rng.randrange(len(own)), rng.randrange(len(own))
        if own[giving]:
            own[giving] -= 1
            own[taking] += 1
        certificate.update(
            counts=counts, step_nanoseconds=problem.nanoseconds(counts), memory_bytes=problem.memory(counts)
        )
        if rng.random() < 0.5:
            certificate["bound_nanoseconds"] = problem.nanoseconds(counts)
    elif kind == 1:
        certificate["bound_nanoseconds"] += rng.choice((-1000, -1, 1, 2, 10, 100, 1000, 10**6))
    elif kind == 2:
        _change_a_number(rng.choice(certificate["proof"]), rng)
    elif kind == 3:
        _change_a_number(certificate, rng)
    elif kind == 4:
        proof = certificate["proof"]
        first, second = rng.randrange(len(proof)), rng.randrange(len(proof))
        proof[first] = copy.deepcopy(proof[second])
    else:
        node = rng.choice(certificate["proof"])
        if node:
            node.pop(rng.choice(list(node)))


def _change_a_number(document: Any, rng: random.Random) -> None:
    """Changes one number somewhere in a document."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (dict, list)):
                collect(item)
            elif isinstance(item, int):
                places.append((value, key))

    collect(document)
    if places:
        holder, key = rng.choice(places)
        changed = rng.choice(
            (holder[key] + 1, holder[key] - 1, holder[key] * 2, holder[key] // 2, 0, 2**40, 1.5, None)
        )
        holder[key] = changed


def _placements(problem: PlacementProblem) -> Iterator[list[list[int]]]:
    for counts in itertools.product(*(compositions(len(kind.units), len(kind.options)) for kind in problem.kinds)):
        yield [list(own) for own in counts]


def test_verification_shares_no_code_with_the_search() -> None:
    """Of the planner's modules it may know the problem alone, and of that no method but the fingerprint."""
    path = Path(planning.__file__).parent / "proofs" / "placement.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {module for module in modules if module.startswith("accelerate_lshdp")}
    assert own == {
        "accelerate_lshdp.planning.placement.problem",
        "accelerate_lshdp.planning.proofs.certificate_fields",
    }
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "problem"
    }
    assert called == {"sha256"}
