# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Verification of a placement's certificate: its time, its memory, and that no placement is faster than its bound.

The certificate has the counts of a placement, its step and memory, a bound, and the proof of the bound: a list of
nodes, of which the first stands for all placements. A node is split in two, or has multipliers. Splits are exhaustive,
whatever they are: at most so many units of a kind have an option, or more have it; at most so many recompute their
activations, or more do; the largest of a peak has at most so many bytes, or more. So a bound that holds in all nodes
with multipliers holds for all placements.

In such a node, with multipliers 0 <= a_p <= times_p of phases and l_k >= 0 of rows (see `planning.placement.problem`
for the other letters), every placement that keeps the limits has

    step  >=  S + sum_p (times_p - a_p) W_p - sum_k l_k (limit_k - fixed_k - what the peaks need at least)
              + sum_u [serial_u + sum_p ((times_p - a_p) work_up + a_p send_up) + sum_k l_k memory_uk]

as times * max(W, C) >= (times - a) W + a C, and memory beyond a limit is not negative. Of the bracket each unit takes
at least the cheapest option that the node's splits leave it.

Everything is an integer, and so exact: no tolerance. Nothing of the solver is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_lshdp.planning.placement.problem import MULTIPLIER_PARTS, Option, PlacementProblem, UnitKind
from accelerate_lshdp.planning.proofs.certificate_fields import CertificateError, is_integer


_KEYS = {"kind", "problem_sha256", "counts", "step_nanoseconds", "memory_bytes", "bound_nanoseconds", "proof"}


def verify_placement(problem: PlacementProblem, certificate: Mapping[str, Any]) -> None:
    """Checks all that a certificate claims.

    Args:
        problem: what there was to choose.
        certificate: as in `PlacementResult.certificate`, or read back from a plan file.

    Raises:
        CertificateError: it is malformed, is about another problem, or claims something that is not so.
    """
    if not isinstance(certificate, Mapping) or set(certificate) != _KEYS or certificate["kind"] != "placement":
        raise CertificateError(
            f"found {certificate!r:.200}, expected an object of the kind placement with the keys {sorted(_KEYS)}"
        )
    if certificate["problem_sha256"] != problem.sha256():
        raise CertificateError(
            f"found a certificate of the problem {certificate['problem_sha256']!r:.70}, expected {problem.sha256()}:"
            " it is about another model, cluster or batch"
        )
    chosen = _chosen(problem, certificate["counts"])
    _check_memory(problem, chosen, certificate["memory_bytes"])
    _check_step(problem, chosen, certificate["step_nanoseconds"])
    bound = certificate["bound_nanoseconds"]
    if not is_integer(bound) or not 0 <= bound <= certificate["step_nanoseconds"]:
        raise CertificateError(f"found bound_nanoseconds {bound!r:.60}, expected an integer from 0 to the step's")
    _check_bound(problem, bound, certificate["proof"])


def _chosen(problem: PlacementProblem, counts: Any) -> list[tuple[int, Option]]:
    """(count, option) of all options that units have."""
    shape = [len(kind.options) for kind in problem.kinds]
    if not isinstance(counts, list) or [len(own) if isinstance(own, list) else -1 for own in counts] != shape:
        raise CertificateError(f"found counts {counts!r:.200}, expected lists of {shape} integers, one a kind of unit")
    for kind, own in zip(problem.kinds, counts, strict=True):
        if not all(is_integer(count) and count >= 0 for count in own) or sum(own) != len(kind.units):
            raise CertificateError(
                f"found counts {own!r:.200} of the kind of {kind.units[0]!r}, expected ones of at least 0 that sum to"
                f" {len(kind.units)}"
            )
    return [
        (count, option)
        for kind, own in zip(problem.kinds, counts, strict=True)
        for option, count in zip(kind.options, own, strict=True)
        if count
    ]


def _check_memory(problem: PlacementProblem, chosen: list[tuple[int, Option]], claimed: Any) -> None:
    largest = [max(option.peaks[peak] for _, option in chosen) for peak in range(3)]
    needed = []
    for place, row in enumerate(problem.rows):
        states = sum(count * option.memory[place] for count, option in chosen)
        needed.append(row.fixed + states + sum(w * peak for w, peak in zip(row.peak_weights, largest, strict=True)))
        if needed[-1] > row.limit:
            raise CertificateError(f"{row.name} needs {needed[-1]} bytes, expected at most its limit {row.limit}")
    if not isinstance(claimed, list) or not all(map(is_integer, claimed)) or claimed != needed:
        raise CertificateError(f"found memory_bytes {claimed!r:.200}, expected {needed}: so much is needed")


def _check_step(problem: PlacementProblem, chosen: list[tuple[int, Option]], claimed: Any) -> None:
    step = problem.serial + sum(count * option.serial for count, option in chosen)
    for place, phase in enumerate(problem.phases):
        computed = phase.nanoseconds + sum(count * option.work[place] for count, option in chosen)
        sent = sum(count * option.send[place] for count, option in chosen)
        step += phase.times * max(computed, sent)
    if not is_integer(claimed) or claimed != step:
        raise CertificateError(f"found step_nanoseconds {claimed!r:.60}, expected {step}: so long is the step")


@dataclass(slots=True)
class _Part:
    """The placements of a node.

    Args:
        least, most: bounds of the counts of each kind's options.
        recomputing: the fewest and the most units of each kind that recompute.
        floor: the least bytes that the largest of each peak has.
    """

    least: list[list[int]]
    most: list[list[int]]
    recomputing: list[list[int]]
    floor: list[int]

    def copy(self) -> _Part:
        return _Part(*([*map(list, own)] for own in (self.least, self.most, self.recomputing)), list(self.floor))


def _check_bound(problem: PlacementProblem, bound: int, nodes: Any) -> None:
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        raise CertificateError(f"found the proof {nodes!r:.200}, expected a list of objects, at least one")
    whole = _Part(
        [[0] * len(kind.options) for kind in problem.kinds],
        [[len(kind.units)] * len(kind.options) for kind in problem.kinds],
        [[0, len(kind.units)] for kind in problem.kinds],
        [0, 0, 0],
    )
    # Parts of nodes come after them, so each is there when its node is reached, and there are no circles.
    parts = {0: whole}
    for place, node in enumerate(nodes):
        if place not in parts:
            raise CertificateError(f"node {place} of the proof is no part of one before it")
        part = parts.pop(place)
        if "split" in node:
            for child, own in zip(_children(node, place, len(nodes)), _split(problem, part, node), strict=True):
                if child in parts:
                    raise CertificateError(f"node {child} of the proof is a part of two nodes")
                parts[child] = own
        elif not _is_empty(problem, part) and _least_step(problem, part, node, place) < bound * MULTIPLIER_PARTS:
            raise CertificateError(
                f"node {place} of the proof does not exclude steps of less than {bound} ns: the bound does not hold"
            )


def _children(node: dict[str, Any], place: int, count: int) -> list[int]:
    children = node.get("parts")
    known = isinstance(children, list) and len(children) == 2 and all(map(is_integer, children))
    if not known or not all(place < child < count for child in children) or children[0] == children[1]:
        raise CertificateError(
            f"found the parts {children!r:.60} of node {place} of the proof, expected two nodes after it"
        )
    return children


def _split(problem: PlacementProblem, part: _Part, node: dict[str, Any]) -> tuple[_Part, _Part]:
    """The two parts of a node: what is split has at most a value, or more."""
    split = node["split"]
    below, beyond = part.copy(), part.copy()
    if isinstance(split, list) and len(split) == 4 and split[0] == "count" and all(map(is_integer, split[1:])):
        _, kind, option, value = split
        if 0 <= kind < len(problem.kinds) and 0 <= option < len(problem.kinds[kind].options):
            below.most[kind][option] = min(below.most[kind][option], value)
            beyond.least[kind][option] = max(beyond.least[kind][option], value + 1)
            return below, beyond
    if isinstance(split, list) and len(split) == 3 and all(map(is_integer, split[1:])):
        what, place, value = split
        if what == "recomputing" and 0 <= place < len(problem.kinds):
            below.recomputing[place][1] = min(below.recomputing[place][1], value)
            beyond.recomputing[place][0] = max(beyond.recomputing[place][0], value + 1)
            return below, beyond
        if what == "peak" and 0 <= place < 3:
            for kind, most in zip(problem.kinds, below.most, strict=True):
                most[:] = [
                    0 if option.peaks[place] > value else own for option, own in zip(kind.options, most, strict=True)
                ]
            beyond.floor[place] = max(beyond.floor[place], value + 1)
            return below, beyond
    raise CertificateError(f"found the split {split!r:.100}, expected what is split and a number")


def _is_empty(problem: PlacementProblem, part: _Part) -> bool:
    """Whether some kind cannot have options for all of its units."""
    return any(
        _fill([0] * len(kind.options), kind, *own) is None
        for kind, *own in zip(problem.kinds, part.least, part.most, part.recomputing, strict=True)
    )


def _least_step(problem: PlacementProblem, part: _Part, node: dict[str, Any], place: int) -> int:
    """The bound of a node by its multipliers, in parts of a nanosecond."""
    sends, rows = node.get("phases"), node.get("rows")
    known = isinstance(sends, list) and len(sends) == len(problem.phases) and all(map(is_integer, sends))
    known = known and isinstance(rows, list) and len(rows) == len(problem.rows) and all(map(_is_multiplier, rows))
    if not known or not all(
        0 <= own <= phase.times * MULTIPLIER_PARTS for own, phase in zip(sends, problem.phases, strict=True)
    ):
        raise CertificateError(
            f"found the multipliers {node!r:.200} of node {place}, expected one for each phase, from 0 to its times,"
            " and one of at least 0 for each row"
        )
    works = [phase.times * MULTIPLIER_PARTS - own for own, phase in zip(sends, problem.phases, strict=True)]
    total = problem.serial * MULTIPLIER_PARTS
    total += sum(own * phase.nanoseconds for own, phase in zip(works, problem.phases, strict=True))
    for own, row in zip(rows, problem.rows, strict=True):
        peaks = sum(weight * floor for weight, floor in zip(row.peak_weights, part.floor, strict=True))
        total -= own * (row.limit - row.fixed - peaks)
    for kind, *own in zip(problem.kinds, part.least, part.most, part.recomputing, strict=True):
        total += _fill(_prices(kind, works, sends, rows), kind, *own)
    return total


def _is_multiplier(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _prices(kind: UnitKind, works: Sequence[int], sends: Sequence[int], rows: Sequence[int]) -> list[int]:
    """What a unit of a kind adds with each option."""
    return [
        MULTIPLIER_PARTS * option.serial
        + sum(map(int.__mul__, works, option.work))
        + sum(map(int.__mul__, sends, option.send))
        + sum(map(int.__mul__, rows, option.memory))
        for option in kind.options
    ]


def _fill(
    prices: list[int], kind: UnitKind, least: Sequence[int], most: Sequence[int], recomputing: Sequence[int]
) -> int | None:
    """The least sum of the prices of a kind's units within the bounds; None: no counts are within them.

    For every number of units that recompute, they and the others take their cheapest options. All numbers are tried.
    """
    units = len(kind.units)
    sums: list[list[int | None]] = []  # for units that keep, and that recompute: of 0, 1, 2, ... of them
    for recomputes in (False, True):
        own = [
            (price, low, high)
            for price, low, high, option in zip(prices, least, most, kind.options, strict=True)
            if option.placement.checkpoint is recomputes
        ]
        if any(low > high for _, low, high in own):
            return None
        total, count = sum(price * low for price, low, _ in own), sum(low for _, low, _ in own)
        found: list[int | None] = [None] * count + [total]
        for price, low, high in sorted(own):
            more = min(high - low, units - len(found) + 1)
            found += [found[-1] + price * number for number in range(1, more + 1)]
        sums.append(found)
    keep, recompute = sums
    totals = [
        keep[units - count] + recompute[count]
        for count in range(max(0, recomputing[0]), min(units, recomputing[1]) + 1)
        if count < len(recompute) and units - count < len(keep)
        if recompute[count] is not None and keep[units - count] is not None
    ]
    return min(totals, default=None)
