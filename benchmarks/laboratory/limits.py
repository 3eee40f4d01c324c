# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""What a benchmark has to reach, beside what it reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """A figure of one case over the same of another, on one network.

    Args:
        numerator: labels of cases; the one with the smallest figure counts.
        denominator: labels, likewise.
        network: its name.
        figure: a key of the case in ``results.json``; of several numbers (one a node) the largest counts.
        within_memory: cases of the denominator count if they need no more memory than this share of what ``lsdp``
            needs; None: all count.
    """

    numerator: tuple[str, ...]
    denominator: tuple[str, ...]
    network: str
    figure: str
    within_memory: float | None = None

    def value(self, cases: Sequence[Mapping[str, Any]]) -> float:
        """The largest such ratio over all clusters and models; NaN if there is none."""
        pairs = {(case["cluster"], case["model"]) for case in cases}
        return _largest(
            self._of([case for case in cases if (case["cluster"], case["model"]) == pair]) for pair in pairs
        )

    def _of(self, cases: Sequence[Mapping[str, Any]]) -> float:
        figures = []
        for labels, most in ((self.numerator, None), (self.denominator, self.within_memory)):
            chosen = [case for case in cases if case["network"] == self.network and case["label"] in labels]
            if most is not None:
                chosen = [case for case in chosen if case["memory_share"] is not None and case["memory_share"] <= most]
            measured = [case[self.figure] for case in chosen if case[self.figure] is not None]
            figures.append(min((max(_list(value)) for value in measured), default=math.nan))
        return figures[0] / figures[1]


@dataclass(frozen=True)
class Deviation:
    """How far figures are from what was expected of them, over all cases that have both.

    Args:
        figure, expected: keys of the case in ``results.json``.
        middle: whether the median counts, else the largest.
    """

    figure: str
    expected: str
    middle: bool

    def value(self, cases: Sequence[Mapping[str, Any]]) -> float:
        """|figure / expected - 1|, lists (one number a node) number by number; NaN if there is none."""
        deviations = []
        for case in cases:
            if case[self.figure] is None or case[self.expected] is None:
                continue
            for figure, expected in zip(_list(case[self.figure]), _list(case[self.expected]), strict=True):
                if expected > 0:
                    deviations.append(abs(figure / expected - 1))
        combine: Callable[[Iterable[float]], float] = median if self.middle else _largest
        return combine(deviations) if deviations else math.nan


@dataclass(frozen=True)
class Limit:
    """One figure that must not exceed a limit."""

    name: str
    of: Ratio | Deviation
    at_most: float

    def judge(self, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The entry in ``results.json``; what could not be measured has the value null and does not hold."""
        value = self.of.value(cases)
        measured = math.isfinite(value)
        return {
            "name": self.name,
            "value": value if measured else None,
            "limit": self.at_most,
            "holds": bool(measured and value <= self.at_most),
        }


def _list(value: Any) -> Sequence[float]:
    return value if isinstance(value, (list, tuple)) else [value]


def _largest(values: Iterable[float]) -> float:
    """NaN if any is: what is missing must not be overlooked."""
    values = list(values)
    return math.nan if not values or any(map(math.isnan, values)) else max(values)
